"""``kill -9`` of the server at random moments: the queue goes on, nothing is lost, nothing is completed twice."""

from __future__ import annotations

import os
import random
import time
from contextlib import suppress

import weft
from tests.serve.direct_queue import DirectQueue, problems
from tests.serve.serving import TASK, ServeProcess, history_of
from tests.serve.test_supervisor import same
from weft.core.errors import WeftError

ROUNDS = int(os.environ.get("WEFT_KILL_ROUNDS", "3"))


def test_killed_servers_lose_nothing(tmp_path):
    draw = random.Random(1)
    server = ServeProcess(tmp_path, "--no-auth", "--checkpoint-seconds", "0.1").start()
    client = weft.Client(server.url)
    fused = [weft.Task(**{**TASK, "epochs": 150}, seed=seed) for seed in range(3)]
    alone = [weft.Task(**{**TASK, "epochs": 150, "model": "sage", "layers": 3})]
    acknowledged = {"fused": client.submit(fused, key="fused"), "alone": client.submit(alone, key="alone")}
    _wait_for_start(server)
    for round_ in range(ROUNDS):
        time.sleep(draw.random() * (1.0 if round_ % 2 else 7.0))
        server.kill()
        server.start()
        with suppress(WeftError):  # a submission that is cut off is repeated with its key
            client.submit([weft.Task(**TASK, seed=50 + round_)], key=f"round-{round_}")
    more = [client.submit([weft.Task(**TASK, seed=50 + n)], key=f"round-{n}")[0] for n in range(ROUNDS)]
    everything = [*acknowledged["fused"], *acknowledged["alone"], *more]
    assert {task["state"] for task in client.wait(everything, 120)} == {"done"}
    with DirectQueue(server.db) as queue:
        assert problems(queue) == []
        assert len(queue.tasks()) == len(everything)
        group = next(one for one in queue.groups() if acknowledged["fused"][0]["id"] in one.members)
    settings = {one["id"]: task for one, task in zip(acknowledged["fused"], fused, strict=True)}
    expected = history_of([settings[name].with_values(name=name) for name in group.members])
    assert all(same(client.result(name)["history"], expected[name]) for name in settings)
    [single] = acknowledged["alone"]
    assert same(client.result(single["id"])["history"], history_of(alone[0])["sage"])
    assert server.stop() == 0


def _wait_for_start(server):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with DirectQueue(server.db) as queue:
            if any(event.kind == "checkpoint" for event in queue.events()):
                return
        time.sleep(0.05)
    raise AssertionError((server.folder / "serve.log").read_text())
