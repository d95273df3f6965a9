"""Users share the devices: a flood of one user's tasks does not keep another waiting, also after a restart."""

from __future__ import annotations

import time

import pytest

from tests.serve.direct_queue import DirectQueue
from tests.serve.serving import Queue
from weft.sched.policies import Backfill
from weft.sched.queue_state import DeviceState, MachineState, QueuedTask, UserShare
from weft.sched.task_queue import UserShares
from weft.serve.queue_db import Group, Submission


def flood(queue, user, count, **more):
    """So many tasks of ``user``, each of another width, so that none is known; those of two users are not fused."""
    layers = 2 if user == "ann" else 3
    settings = [{"hidden": 4 + place, "layers": layers, "epochs": 2, "seed": place} for place in range(count)]
    return queue.submit(*settings, user=user, **more)


def starts(queue):
    """The users of the tasks, in the order in which they started."""
    groups = sorted(queue.db.groups(limit=1000), key=lambda group: group.started)
    return [queue.db.get(name).user for group in groups for name in group.members]


def test_a_user_who_comes_later_has_half_of_the_next_starts(tmp_path):
    queue = Queue(tmp_path)
    try:
        flood(queue, "ann", 300)
        queue.until(lambda: len(starts(queue)) >= 2)
        flood(queue, "bob", 20)
        before = len(starts(queue))  # writing waits for the file, while the server goes on
        queue.until(lambda: len(starts(queue)) >= before + 12)
        next_ones = starts(queue)[before : before + 12]
        assert 3 <= next_ones.count("bob") <= 9, next_ones
    finally:
        for task in queue.db.tasks(limit=1000):
            queue.db.cancel(task.id)
        queue.close()


def test_what_waits_for_long_does_not_rise_while_its_lane_is_served(tmp_path):
    """Hundreds of tasks that wait for an hour are no reason to let those of another user wait."""
    shares = UserShares()
    old = [QueuedTask(f"a{place}", 1, 1.0, user="ann", arrival=0.0) for place in range(9)]
    new = QueuedTask("b", 1, 1.0, user="bob", arrival=3590.0)
    shares.charge("ann", 500.0)
    shares.started(old[0], 3599.0)
    machine = MachineState((DeviceState("d", 100, workers=1),), 3600.0, shares.with_running({}))
    assert Backfill().schedule([*old[1:], new], [], machine).started == ("b",)


def test_who_comes_anew_is_level_with_the_least_served():
    shares = UserShares([UserShare("ann", 900.0), UserShare("cid", 50.0)])
    shares.see({"ann"})
    shares.see({"ann", "bob", "cid"})
    assert [shares.of(user).device_seconds for user in ("ann", "bob", "cid")] == [900.0, 900.0, 900.0]
    shares.see({"bob"})
    shares.charge("bob", 10.0)
    shares.see({"ann", "bob"})
    assert [shares.of(user).device_seconds for user in ("ann", "bob")] == [910.0, 910.0]


def test_who_comes_back_keeps_what_they_had_above_the_least_served():
    shares = UserShares([UserShare("ann", 900.0), UserShare("bob", 100.0), UserShare("cid", 500.0)])
    shares.see({"ann", "bob"})
    shares.see({"ann", "bob", "cid"})
    assert shares.of("cid").device_seconds == 500.0


def test_shares_are_in_the_file(tmp_path):
    with DirectQueue(tmp_path / "queue.db") as db:
        db.submit(Submission({"task": {}}, id="t", user="ann"))
        db.plan("t", {"bytes": 1})
        group = Group("g", "cpu", "w", ("t",), "t", 1, 1.0, "", time.time())
        db.claim_all(["t"], "w", 30.0, group, [UserShare("ann", 2.0, {"0": 5.0})])
        db.end_group("g", "ended", shares=[UserShare("ann", 3.5, {"0": 5.0})])
    with DirectQueue(tmp_path / "queue.db") as db:
        assert db.shares() == [UserShare("ann", 3.5, {"0": 5.0})]


def test_shares_survive_a_restart_of_the_server(tmp_path):
    queue = Queue(tmp_path)
    try:
        queue.wait(queue.submit({"seed": 1}, user="ann"))
        queue.until(lambda: any(one.device_seconds > 0 for one in queue.db.shares()))
        had = queue.db.shares()[0]
        assert had.user == "ann"
        assert had.device_seconds > 0
        assert "0" in had.last_start
    finally:
        queue.close()
    again = Queue(tmp_path)
    try:
        again.wait(again.submit({"seed": 2}, user="bob"))
        assert again.supervisor.state.shares.of("ann").device_seconds == pytest.approx(had.device_seconds)
    finally:
        again.close()


def test_the_first_tasks_of_a_state_are_those_of_all_users(tmp_path):
    with DirectQueue(tmp_path / "queue.db") as db:
        db.submit_many([Submission({"task": {}}, id=f"a{place}", user="ann") for place in range(20)])
        db.submit_many([Submission({"task": {}}, id=f"b{place}", user="bob", priority=place) for place in range(3)])
        assert [task.id for task in db.in_turn("queued", 6)] == ["a0", "b2", "a1", "b1", "a2", "b0"]
        assert list(db.stamps("queued", 3)) == ["a0", "b2", "a1"]
