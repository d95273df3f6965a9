"""What the next server says of tasks that ran when a server died."""

from __future__ import annotations

import pytest

from tests.serve.direct_queue import DirectQueue
from tests.serve.serving import TASK
from weft.serve.queue_db import Group, Submission
from weft.serve.state import RESTARTED, take_over


@pytest.fixture
def ran(tmp_path):
    """The queue of a server that died, and two tasks of it: one that two servers have died of, and another."""
    with DirectQueue(tmp_path / "queue.db") as db:
        names = [db.submit(Submission({"task": TASK}, max_attempts=1, user=user)).id for user in ("anna", "ben")]
        db.plan_many([(names[0], {"suspect_of_death": 1, "deaths": 1}), (names[1], {})])
        db.claim_all(names, "w", 60.0, Group("g", "cpu", "w", tuple(names), "g", 0, 0.0, "", 0.0))
        yield db, names


def test_a_task_that_is_held_does_not_change_what_others_are_told(ran):
    db, (bad, good) = ran
    take_over(db, [db.get(bad), db.get(good)], died=True)
    assert db.get(bad).state == "paused"
    assert "it is held" in db.get(bad).error
    assert (db.get(good).state, db.get(good).error) == ("queued", RESTARTED)


def test_a_server_that_dies_while_it_takes_over_is_not_counted_against_a_task(ran, monkeypatch):
    db, (_, good) = ran
    before = db.get(good)

    def die(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(db, "release", die)
        with pytest.raises(KeyboardInterrupt):
            take_over(db, [before], died=True)
    assert db.get(good).plan == before.plan
    take_over(db, [db.get(good)], died=True)
    assert (db.get(good).state, db.get(good).plan["deaths"]) == ("queued", 1)
