"""Session: stepped from outside, in this process and in another."""

from __future__ import annotations

import json
import multiprocessing

import pytest

from tests.engine.training.session_worker import make_session, outcome, work
from weft.core.decision import Decision, GroupOutline, Requests, Stop, Update
from weft.core.errors import SpecError, TrainingError
from weft.core.run_options import RunOptions
from weft.engine.driver import Driver
from weft.engine.session import outline_of

CANCEL = Requests(frozenset({"b"}))


def by_epoch(epoch, *pairs):
    """The latest of ``pairs`` (from which epoch, what is asked) that has come."""
    return next((asked for since, asked in reversed(pairs) if epoch >= since), Requests())


def driven(session, *pairs, period=None, **options):
    """Drive a session in this process; the decisions that were made."""
    driver, decisions = Driver(outline_of(session.group), RunOptions(**options), period=period), []
    while not session.finished:
        updates = session.advance()
        decisions.append(driver.decide(updates, by_epoch(session.group.epoch, *pairs)))
        session.apply(decisions[-1])
    return decisions


def drive_another_process(folder, resume, ask):
    """Decide here for a session there; what came of it, and the decisions."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=work, args=(there, str(folder), resume))
    process.start()
    there.close()
    try:
        receive = lambda: here.recv_bytes().decode()  # noqa: E731
        driver, decisions = Driver(GroupOutline.from_dict(json.loads(receive())), period=8), []
        while not decisions or not decisions[-1].finish:
            decisions.append(driver.decide([Update.from_dict(one) for one in json.loads(receive())], ask(decisions)))
            here.send_bytes(decisions[-1].to_json().encode())
        found = json.loads(receive())
    finally:
        process.join(60)
        process.kill()
    assert process.exitcode == 0
    return found, decisions


def test_paused_cancelled_saved_and_resumed_in_another_process_is_uninterrupted(tmp_path):
    """One driver, here, for two sessions that live one after the other in processes of their own."""

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
    whole = make_session()
    driven(whole, (32, CANCEL), period=8)
    assert second == json.loads(json.dumps(outcome(whole))), "bit for bit"
    assert [len(one["rows"]) for one in second.values()] == [20, 32, 60]


def test_train_is_the_loop():
    looped, trained = make_session(), make_session()
    driven(looped)
    trained.train()
    assert outcome(looped) == outcome(trained)
    assert trained.finished


def test_the_first_advance_trains_nothing_and_tells_where_everybody_stands(tmp_path):
    session = make_session(tmp_path / "run")
    first = session.advance()
    assert [(update.member, update.rows, update.epochs) for update in first] == [(n, (), 0) for n in "abc"]
    session.apply(Decision(0, advance=3))
    second = session.advance()
    assert [(update.first, len(update.rows), update.epochs, update.steps) for update in second] == [(0, 3, 3, 3)] * 3
    assert all(update.seconds > 0 and update.prepare_seconds > 0 for update in second)
    session.apply(Decision(3, save=True, pause=True))
    assert session.paused
    assert [update.rows for update in session.advance()] == [(), (), ()], "paused"
    session.apply(Decision(3, advance=2))
    assert [update.first for update in session.advance()] == [3, 3, 3]
    assert [len(update.rows) for update in session.standing()] == [5, 5, 5]


def test_a_checkpoint_that_cannot_be_written_on_the_way_is_tried_again(tmp_path):
    session, notes, tries = make_session(tmp_path / "run"), [], []
    real = session._save_to

    def full_at_first(group, about):
        tries.append(group.epoch)
        if len(tries) < 3:
            raise TrainingError("cannot write to run: No space left on device")
        return real(group, about)

    session._save_to = full_at_first
    session._events.note = notes.append
    driven(session, checkpoint_every=0.0)
    assert session.checkpoint is not None
    assert len(notes) == 2
    assert notes[0].startswith(f"no checkpoint after epoch {tries[0]}: cannot write to run: No space left on device; ")
    assert notes[1] == f"checkpoints are written again, after epoch {tries[2]}"
    last = make_session(tmp_path / "run")
    last._save_to = lambda group, about: tries.clear() or full_at_first(group, about)
    notes.clear()
    last._events.note = notes.append
    driven(last, checkpoint_every=1e9)  # its results are still to be written
    assert [note.partition(":")[0] for note in notes] == [f"no checkpoint after epoch {last.group.epoch}"]


@pytest.mark.parametrize(
    ("decision", "message"),
    [
        (Decision(4, advance=1), "decision after epoch 4: the session is at epoch 0"),
        (Decision(0, stop=(Stop("x", "pruned"),)), "no member is called 'x'; they are: a, b, c"),
        (Decision(0, drop=("a",)), r"drop=\['a'\] names members that run; stop them first"),
        (Decision(0, finish=True), "finish=True with 'a' running needs a reason"),
    ],
)
def test_decisions_that_do_not_fit_are_refused_and_change_nothing(decision, message):
    session = make_session()
    session.advance()
    with pytest.raises(SpecError, match=message):
        session.apply(decision)
    assert [track.status for track in session.members] == ["running"] * 3
    session.apply(Decision(0, stop=(Stop("a", "pruned"),), drop=("a",), advance=2))
    with pytest.raises(SpecError, match="'a' cannot be stopped, it has ended already"):
        session.apply(Decision(0, stop=(Stop("a", "pruned"),)))
    assert [update.member for update in session.advance()] == ["b", "c"]


def test_every_note_is_told_once_wherever_a_group_puts_it():
    events = []
    session = make_session(told=events.append)
    session.group.stacks[0].members.notes.append("of a stack")
    driver = Driver(outline_of(session.group), period=8)
    for note in ("of the group", "later, of the group"):
        session.group._notes.append(note)  # these stand before those of its stacks
        session.apply(driver.decide(session.advance(), Requests()))
    told = [event.data["message"] for event in events if event.kind == "note"]
    assert told == ["of the group", "of a stack", "later, of the group"]
