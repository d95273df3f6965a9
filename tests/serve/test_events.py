"""Events as they happen, for many who follow them from different places."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import weft
from tests.serve.direct_queue import DirectQueue
from tests.serve.serving import TASK, ServeProcess
from weft.serve.queue_db import Submission

pytest.importorskip("fastapi")


def follow(server, since: int, task: str | None, until: int) -> list[dict]:
    """Events after ``since`` up to one of number ``until`` or more."""
    found = []
    for event in weft.Client(server.url).events(since, task):
        found.append(event)
        if event["seq"] >= until:
            return found
    return found


@pytest.mark.long
def test_all_who_follow_see_every_event_once_from_where_they_begin(tmp_path):
    """Also from events of before the server started, in more pages than one, and while new ones come."""
    process = ServeProcess(tmp_path, "--no-auth")
    with DirectQueue(process.db) as queue:
        [old, *_] = queue.submit_many([Submission({"task": {**TASK, "seed": seed}}) for seed in range(700)])
        for task in queue.tasks(limit=700)[1:]:
            queue.cancel(task.id)
    process.start()
    try:
        client = weft.Client(process.url)
        [new] = client.wait(client.submit(weft.Task(**TASK, seed=7)), 60)
        client.wait([old.id], 60)
        with DirectQueue(process.db) as queue:
            last = queue.last_seq()
            ends = {name: queue.events(task=name, limit=10_000)[-1].seq for name in (old.id, new["id"])}
            starts = [0, 0, 1, 499, 500, 501, 1300, last - 1]
        with ThreadPoolExecutor(len(starts) + 2) as pool:
            streams = [pool.submit(follow, process, since, None, last + 1) for since in starts]
            own = {name: pool.submit(follow, process, 0, name, last) for name, last in ends.items()}
            time.sleep(1.0)
            client.wait(client.submit(weft.Task(**TASK, seed=8)), 60)
            found = [stream.result(60) for stream in streams]
            events = {name: stream.result(60) for name, stream in own.items()}
        with DirectQueue(process.db) as queue:
            stored = {event.seq: event for event in queue.events(limit=100_000)}
            for since, seen in zip(starts, found, strict=True):
                numbers = [event["seq"] for event in seen]
                assert numbers == [seq for seq in stored if since < seq <= numbers[-1]]
            for name, seen in events.items():
                assert [event["seq"] for event in seen] == [e.seq for e in queue.events(task=name, limit=10_000)]
        for event in found[0]:
            kept = stored[event["seq"]]
            assert (event["task"], event["kind"], event["data"]) == (kept.task, kept.kind, kept.data)
            assert event["time"] == pytest.approx(kept.time, abs=1e-3)
    finally:
        process.stop()


@pytest.mark.long
def test_folders_of_the_server_are_not_in_events_though_they_are_no_ascii(tmp_path):
    folder = tmp_path / "grün"
    (folder / "graphs").mkdir(parents=True)
    (folder / "graphs" / "bad.npz").write_bytes(b"no graph")
    process = ServeProcess(folder, "--no-auth", "--graphs", str(folder / "graphs")).start()
    try:
        client = weft.Client(process.url)
        [task] = client.wait(client.submit(weft.Task(graph="bad", epochs=1)), 60)
        events = [json.dumps(event, ensure_ascii=False) for event in follow(process, 0, task["id"], 2)]
        assert "bad.npz" in events[-1]
        assert "grün" not in "".join(events)
    finally:
        process.stop()
