"""Pruning across processes: a decision at an epoch takes the scores of others at that epoch, and waits for them."""

from __future__ import annotations

import threading
from dataclasses import replace

from weft.core.decision import Requests
from weft.core.member import Member
from weft.planner.pruning import Rivals

PEERS = "val_accuracy on demo"


def member(name: str, scores: list[float]) -> Member:
    rows = [(1.0, score) for score in scores]
    return Member(name, 60, ("loss", "val_accuracy"), "accuracy", "", PEERS, rows)


def known(bests: list[float | None], running: bool = False, peers: str = PEERS) -> dict:
    return {"peers": peers, "bests": bests, "running": running}


def test_scores_are_those_up_to_the_epoch():
    told: list[dict] = []
    rivals = Rivals("median", told.append, Requests)
    rivals.take({"a": known([0.1, None, 0.3, 0.4]), "b": known([0.5]), "c": known([0.9] * 4, peers="val_mse on x")})
    assert rivals.at(30, [member("own", [0.2] * 25 + [0.6] * 5)], PEERS) == {"a": [0.1, 0.3], "b": [0.5]}
    assert told == [{"own": {"peers": PEERS, "bests": [0.2, 0.2, 0.6]}}]


def test_the_last_epochs_of_a_member_count():
    rivals = Rivals("median", lambda _: None, Requests)
    rivals.at(20, [member("own", [0.2] * 20 + [0.7] * 5)], PEERS)
    assert rivals.standing()["own"]["bests"] == [0.2, 0.2, 0.7]


def test_a_decision_waits_until_others_have_come_as_far():
    rivals, found = Rivals("median", lambda _: None, Requests), []
    rivals.take({"a": known([0.1, 0.2], running=True), "b": known([0.1], running=False)})
    thread = threading.Thread(target=lambda: found.append(rivals.at(30, [member("own", [0.2] * 30)], PEERS)))
    thread.start()
    thread.join(0.3)
    assert not found
    rivals.take({"a": known([0.1, 0.2, 0.3], running=True)})
    thread.join(10)
    assert found == [{"a": [0.1, 0.2, 0.3], "b": [0.1]}]


def test_one_that_leaves_is_no_longer_waited_for():
    rivals, found = Rivals("median", lambda _: None, Requests), []
    rivals.take({"a": known([], running=True)})
    thread = threading.Thread(target=lambda: found.append(rivals.at(30, [member("own", [0.2] * 30)], PEERS)))
    thread.start()
    rivals.take({"a": known([], running=False, peers="")})
    thread.join(10)
    assert found == [{}]


def test_a_run_that_is_to_leave_waits_for_nobody():
    for asked in ({"preempt": True}, {"interrupt": True}, {"cancel_all": True}, {"cancel": frozenset(["own"])}):
        rivals = Rivals("median", lambda _: None, lambda asked=asked: replace(Requests(), **asked))
        rivals.take({"a": known([], running=True)})
        assert rivals.at(30, [member("own", [0.2] * 30)], PEERS) is None
