"""Driver: decisions from updates alone, without torch, a clock or a device."""

from __future__ import annotations

import subprocess
import sys

import pytest

from weft.core.decision import GroupOutline, MemberOutline, Requests, Stop, Update
from weft.core.errors import SpecError
from weft.core.member import Member
from weft.core.run_options import RunOptions
from weft.engine.driver import Driver


def outline(*epochs, device="cpu", peers="", **about):
    members = tuple(MemberOutline(f"m{i}", count, 0, peers) for i, count in enumerate(epochs))
    return GroupOutline(members, device, **about)


class Group:
    """Stands for a session: trains what is decided, with a score that is the member's number."""

    def __init__(self, group, epoch_seconds=0.01, prepare_seconds=0.0):
        self.members, self.epoch_seconds, self.prepare_seconds = group.members, epoch_seconds, prepare_seconds
        self.epoch, self.status = 0, {member.name: "running" for member in group.members}
        self.decisions = []

    def updates(self, advance):
        first, self.epoch = self.epoch, self.epoch + advance
        found = []
        for member in self.members:
            if self.status[member.name] == "running":
                end = min(self.epoch, member.epochs)
                if end == member.epochs:
                    self.status[member.name] = "finished"
                rows = tuple((float(member.name[1:]),) for _ in range(first, end))
                timed = {"seconds": advance * self.epoch_seconds, "prepare_seconds": self.prepare_seconds}
                status = self.status[member.name]
                found.append(Update(member.name, first, rows, member.epochs, epochs=self.epoch, status=status, **timed))
        return found

    def drive(self, driver, ask=lambda epoch: Requests(), most=1000):
        advance = 0
        for _ in range(most):
            decision = driver.decide(self.updates(advance), ask(self.epoch))
            self.decisions.append(decision)
            self.status |= {stop.member: stop.status for stop in decision.stop}
            if decision.finish:
                return self.decisions
            advance = decision.advance
        return self.decisions


def test_no_torch_is_needed_to_decide():
    code = "import sys, weft.engine.driver, weft.core.decision; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_period_follows_the_speed_that_updates_tell():
    group = outline(1000)
    decided = Group(group, epoch_seconds=0.01).drive(Driver(group, RunOptions(checkpoint_every=1e9)))
    assert [decision.advance for decision in decided[:5]] == [1, 8, 20, 20, 20], "0.2 seconds between updates"
    assert (decided[-1].finish, decided[-1].save) == (True, True)
    fixed = Group(group).drive(Driver(group, RunOptions(checkpoint_every=1e9), period=7))
    assert {decision.advance for decision in fixed[:-1]} == {7}


def test_the_same_updates_give_the_same_decisions():
    group = outline(30, 50, 50)
    first, second = (Group(group, 0.003).drive(Driver(group)) for _ in range(2))
    assert first == second


def test_ended_members_leave_at_fixed_epochs_on_a_cpu():
    group = outline(5, 60, 60)
    decided = Group(group, epoch_seconds=0.001).drive(Driver(group))
    assert [(decision.epoch, decision.drop) for decision in decided if decision.drop] == [(16, ("m0",))]
    compiled = Group(group).drive(Driver(outline(5, 60, 60, compiled=True)))
    assert not any(decision.drop for decision in compiled)


def test_ended_members_leave_a_gpu_when_that_pays():
    group = outline(5, 1000, 1000, device="cuda")
    cheap = Group(group, epoch_seconds=0.01, prepare_seconds=0.001).drive(Driver(group), most=30)
    dear = Group(group, epoch_seconds=0.01, prepare_seconds=1e6).drive(Driver(group), most=30)
    assert [decision.drop for decision in cheap if decision.drop] == [("m0",)]
    assert not any(decision.drop for decision in dear)


def test_checkpoints_are_due_by_measured_seconds():
    group = outline(1000)
    options = RunOptions(checkpoint_every=1.0)
    decided = Group(group, epoch_seconds=0.05).drive(Driver(group, options, period=10))
    assert [decision.epoch for decision in decided if decision.save][:3] == [20, 40, 60]
    always = Group(group).drive(Driver(group, RunOptions(checkpoint_every=0.0), period=100))
    assert [decision.save for decision in always] == [False] + [True] * 10, "not before anything was trained"


def test_pruning_is_asked_at_fixed_epochs_among_peers():
    asked = []

    def policy(epoch, scores, running):
        asked.append((epoch, {name: len(values) for name, values in scores.items()}, list(running)))
        return ["m0"] if "m0" in running else []

    board = {"other": Member(MemberOutline("other", 9, 0, "elsewhere"), rows=[(1.0,)])}
    group = outline(25, 25, peers="here")
    decided = Group(group, epoch_seconds=0.001).drive(Driver(group, RunOptions(prune=policy), board))
    assert asked == [(10, {"m0": 10, "m1": 10}, ["m0", "m1"]), (20, {"m0": 10, "m1": 20}, ["m1"])]
    stops = [stop for decision in decided for stop in decision.stop]
    assert stops == [Stop("m0", "pruned", "task 'm0': pruned after epoch 10")]
    assert set(board) == {"other", "m0", "m1"}


def test_requests_from_outside():
    group = outline(50, 50)
    paused = Group(group).drive(Driver(group), lambda epoch: Requests(pause=epoch >= 9), most=6)
    assert [(d.pause, d.save, d.advance) for d in paused[2:]] == [(True, True, 0), *[(True, False, 0)] * 3]
    for field, reason in (("preempt", "preempted"), ("interrupt", "interrupted")):
        *_, last = Group(group).drive(Driver(group), lambda epoch, field=field: Requests(**{field: epoch >= 9}))
        assert (last.epoch, last.save, last.finish, last.reason) == (9, True, True, reason)
    *_, last = Group(group).drive(Driver(group), lambda epoch: Requests(frozenset({"m1"}), cancel_all=epoch >= 9))
    assert [(stop.member, stop.status) for stop in last.stop] == [("m0", "cancelled")]
    assert (last.finish, last.reason) == (True, "")


def test_a_driver_that_comes_later_takes_over():
    group = outline(40)
    session = Group(group)
    session.drive(Driver(group, period=10), most=3)
    standing = [Update("m0", 0, ((0.0,),) * session.epoch, 40, epochs=session.epoch, seconds=9.0)]
    asked = []
    policy = lambda *arguments: asked.append(arguments)  # noqa: E731
    later = Driver(group, RunOptions(prune=policy, checkpoint_every=1.0), period=10)
    decision = later.decide(standing)
    assert (decision.epoch, decision.advance, decision.save, asked) == (20, 10, False, [])


def test_updates_of_strangers_are_refused():
    with pytest.raises(SpecError, match="update of 'x': this driver knows m0"):
        Driver(outline(3)).decide([Update("x", 0, (), 3)])
