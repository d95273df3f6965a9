"""Submissions written together: one commit for many, each answered for itself, none before it is on the disk."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serve.direct_queue import DirectQueue
from weft.serve.queue_db import QueueError, Submission
from weft.serve.service import GroupCommit


def run(write, requests):
    with ThreadPoolExecutor(1) as pool:

        async def all_at_once():
            commits = GroupCommit(pool, write)
            return await asyncio.gather(*(commits.put(one) for one in requests), return_exceptions=True)

        return asyncio.run(all_at_once())


def test_requests_that_arrive_together_are_written_together():
    batches = []

    def write(requests):
        batches.append(list(requests))
        return [one * 10 for one in requests]

    assert run(write, range(1000)) == [one * 10 for one in range(1000)]
    assert [one for batch in batches for one in batch] == list(range(1000))
    assert len(batches) <= 5


def test_an_error_is_the_answer_to_one_request_alone():
    def write(requests):
        return [ValueError("bad") if one == 2 else one for one in requests]

    found = run(write, range(4))
    assert [type(one) for one in found] == [int, int, ValueError, int]


def test_a_write_that_fails_is_told_to_all_of_its_requests():
    def write(requests):
        raise OSError("disk full")

    assert [type(one) for one in run(write, range(3))] == [OSError] * 3


def test_a_request_that_is_cancelled_while_it_waits_is_not_written():
    written, begun, go_on = [], threading.Event(), threading.Event()

    def write(requests):
        written.extend(requests)
        begun.set()
        assert go_on.wait(10)
        return requests

    async def cancel_the_second(pool):
        commits = GroupCommit(pool, write)
        first = asyncio.create_task(commits.put("first"))
        await asyncio.to_thread(begun.wait, 10)
        second = asyncio.create_task(commits.put("second"))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        go_on.set()
        assert await first == "first"
        assert await commits.put("third") == "third"

    with ThreadPoolExecutor(1) as pool:
        asyncio.run(cancel_the_second(pool))
    assert written == ["first", "third"]


def test_a_batch_that_is_refused_leaves_the_others(tmp_path):
    with DirectQueue(tmp_path / "q.db") as queue:
        good, bad = Submission({"n": 1}, id="a"), Submission({"n": 2}, id="b", after=("missing",))
        answers = queue.submit_apart([[good], [Submission({"n": 3}, id="c"), bad], [Submission({"n": 4}, id="d")]])
        assert [type(one) for one in answers] == [list, QueueError, list]
        assert [task.id for task in queue.tasks()] == ["a", "d"]  # c was submitted with b: all or none
        assert len(queue.events()) == 2


@pytest.mark.parametrize("quota", [3])
def test_a_quota_holds_for_requests_that_arrive_together(tmp_path, quota):
    pytest.importorskip("fastapi")
    from weft.serve.options import ServeOptions
    from weft.serve.service import QueueService
    from weft.serve.submissions import BadRequestError
    from weft.serve.supervisor import Supervisor

    options = ServeOptions(tmp_path / "q.db", quota=quota, devices=("cpu",))
    service = QueueService(options, Supervisor(options))
    body = b'{"task": {"graph": "demo", "model": "gcn"}}'
    answers = service.submit_together([(body, "ann")] * 5 + [(body, "ben")])
    refused = [one for one in answers if isinstance(one, BadRequestError)]
    assert (len(refused), {one.status for one in refused}) == (2, {429})
    assert isinstance(answers[-1], list)
    service._close_here()
