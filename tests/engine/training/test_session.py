"""Session: stepped from outside, in this process and in another."""

from __future__ import annotations

import json
import multiprocessing

import pytest

from tests.engine.training.session_worker import make_session, outcome, work
from weft.core.decision import Decision, Progress, Requests, Stop
from weft.core.errors import SpecError, TrainingError

CANCEL = Requests(frozenset({"b"}))


def by_epoch(epoch, *pairs):
    """The latest of ``pairs`` (from which epoch, what is asked) that has come."""
    return next((asked for since, asked in reversed(pairs) if epoch >= since), Requests())


def driven(session, *pairs):
    """Drive a session in this process; the decisions that were made."""
    decisions = []
    while not session.finished:
        progress = session.advance()
        decisions.append(session._driver.decide(progress, by_epoch(progress.epochs, *pairs)))
        session.apply(decisions[-1])
    return decisions


def drive_another_process(folder, resume, ask):
    """Steer a session in another process by requests; what came of it, and the decisions there."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=work, args=(there, str(folder), resume))
    process.start()
    there.close()
    try:
        decisions = []
        while not decisions or not decisions[-1].finish:
            here.recv()
            here.send(ask(decisions))
            decisions.append(here.recv())
        found = json.loads(here.recv_bytes().decode())
    finally:
        process.join(60)
        process.kill()
    assert process.exitcode == 0
    return found, decisions


def test_paused_cancelled_saved_and_resumed_in_another_process_is_uninterrupted(tmp_path):
    """Two sessions that live one after the other in processes of their own."""

    def ask_first(decisions):
        epoch = decisions[-1].epoch + decisions[-1].advance if decisions else 0
        pauses = sum(decision.pause for decision in decisions)
        if epoch == 32 and pauses < 3:
            return Requests(pause=True)
        return Requests(CANCEL.cancel if epoch >= 32 else frozenset(), preempt=epoch >= 40)

    first, decisions = drive_another_process(tmp_path / "run", False, ask_first)
    assert [decision.epoch for decision in decisions if decision.pause] == [32, 32, 32]
    assert {name: one["status"] for name, one in first.items()} == {
        "a": "finished",
        "b": "cancelled",
        "c": "preempted",
    }
    assert (decisions[-1].reason, decisions[-1].epoch) == ("preempted", 40)
    second, later = drive_another_process(tmp_path / "run", True, lambda decisions: CANCEL)
    assert later[0].epoch == 40
    whole = make_session(period=8)
    driven(whole, (32, CANCEL))
    assert second == json.loads(json.dumps(outcome(whole))), "bit for bit"
    assert [len(one["rows"]) for one in second.values()] == [20, 32, 60]


def test_train_is_the_loop():
    looped, trained = make_session(), make_session()
    driven(looped)
    trained.train()
    assert outcome(looped) == outcome(trained)
    assert trained.finished


def test_the_first_advance_trains_nothing(tmp_path):
    session = make_session(tmp_path / "run")
    assert session.advance() == Progress(0)
    session.apply(Decision(0, advance=3))
    progress = session.advance()
    assert progress.epochs == 3
    assert progress.seconds > 0
    assert progress.prepare_seconds > 0
    assert [member.epoch for member in session.members] == [3, 3, 3]
    session.apply(Decision(3, save=True, pause=True))
    assert session.paused
    assert session.advance() == Progress(3), "paused"
    session.apply(Decision(3, advance=2))
    assert session.advance().epochs == 5
    assert [member.epoch for member in session.members] == [5, 5, 5]


def test_a_checkpoint_that_cannot_be_written_on_the_way_is_tried_again(tmp_path):
    session, notes, tries = make_session(tmp_path / "run", checkpoint_every=0.0), [], []
    real = session._save_to

    def full_at_first(group, about):
        tries.append(group.epoch)
        if len(tries) < 3:
            raise TrainingError("cannot write to run: No space left on device")
        return real(group, about)

    session._save_to = full_at_first
    session._events.note = notes.append
    driven(session)
    assert session.checkpoint is not None
    assert len(notes) == 2
    assert notes[0].startswith(f"no checkpoint after epoch {tries[0]}: cannot write to run: No space left on device; ")
    assert notes[1] == f"checkpoints are written again, after epoch {tries[2]}"
    last = make_session(tmp_path / "run", checkpoint_every=1e9)
    last._save_to = lambda group, about: tries.clear() or full_at_first(group, about)
    notes.clear()
    last._events.note = notes.append
    driven(last)  # its results are still to be written
    assert [note.partition(":")[0] for note in notes] == [f"no checkpoint after epoch {last.group.epoch}"]


def test_a_decision_of_another_epoch_is_refused_and_changes_nothing():
    session = make_session()
    session.advance()
    with pytest.raises(SpecError, match="decision after epoch 4: the session is at epoch 0"):
        session.apply(Decision(4, advance=1))
    assert [track.status for track in session.members] == ["running"] * 3
    session.apply(Decision(0, stop=(Stop("a", "pruned"),), drop=("a",), advance=2))
    session.advance()
    assert [(member.epoch, member.present) for member in session.members] == [(0, False), (2, True), (2, True)]


def test_every_note_is_told_once_wherever_a_group_puts_it():
    events = []
    session = make_session(told=events.append, period=8)
    session.group.stacks[0].members.notes.append("of a stack")
    for note in ("of the group", "later, of the group"):
        session.group._notes.append(note)  # these stand before those of its stacks
        session.apply(session.decide(session.advance()))
    told = [event.data["message"] for event in events if event.kind == "note"]
    assert told == ["of the group", "of a stack", "later, of the group"]
