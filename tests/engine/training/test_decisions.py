"""Driver: decisions from what members recorded alone, without torch, a clock or a device."""

from __future__ import annotations

import subprocess
import sys

from weft.core.decision import Progress, Requests, Stop
from weft.core.member import Member
from weft.core.run_options import RunOptions
from weft.engine.driver import Driver


class Group:
    """Stands for a session: trains what is decided, with a score that is the member's number."""

    def __init__(self, *epochs, epoch_seconds=0.01, prepare_seconds=0.0, peers=""):
        self.epoch_seconds, self.prepare_seconds = epoch_seconds, prepare_seconds
        self.members = [Member(f"m{i}", count, ("val_x",), "x", peers=peers) for i, count in enumerate(epochs)]
        self.epoch, self.decisions = 0, []

    def advance(self, epochs):
        self.epoch += epochs
        for member in self.members:
            if member.running:
                member.rows += [(float(member.name[1:]),)] * (min(self.epoch, member.epochs) - member.epoch)
                member.status = "finished" if member.epoch == member.epochs else "running"
        return Progress(self.epoch, epochs * self.epoch_seconds, self.prepare_seconds)

    def drive(self, ask=lambda epoch: Requests(), most=1000, **settings):
        driver, epochs = Driver(self.members, **settings), 0
        for _ in range(most):
            decision = driver.decide(self.advance(epochs), ask(self.epoch))
            self.decisions.append(decision)
            for member in self.members:
                member.present = member.present and member.name not in decision.drop
                member.status = next((s.status for s in decision.stop if s.member == member.name), member.status)
            if decision.finish:
                return self.decisions
            epochs = decision.advance
        return self.decisions


def test_no_torch_is_needed_to_decide():
    code = "import sys, weft.engine.driver, weft.core.decision; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_period_follows_the_speed_that_updates_tell():
    seldom = RunOptions(checkpoint_every=1e9)
    decided = Group(1000, epoch_seconds=0.01).drive(options=seldom)
    assert [decision.advance for decision in decided[:5]] == [1, 8, 20, 20, 20], "0.2 seconds between updates"
    assert (decided[-1].finish, decided[-1].save) == (True, True)
    fixed = Group(1000).drive(options=seldom, period=7)
    assert {decision.advance for decision in fixed[:-1]} == {7}


def test_the_same_updates_give_the_same_decisions():
    first, second = (Group(30, 50, 50, epoch_seconds=0.003).drive() for _ in range(2))
    assert first == second


def test_ended_members_leave_at_fixed_epochs_on_a_cpu():
    decided = Group(5, 60, 60, epoch_seconds=0.001).drive()
    assert [(decision.epoch, decision.drop) for decision in decided if decision.drop] == [(16, ("m0",))]
    compiled = Group(5, 60, 60).drive(compiled=True)
    assert not any(decision.drop for decision in compiled)


def test_ended_members_leave_a_gpu_when_that_pays():
    cheap = Group(5, 1000, 1000, epoch_seconds=0.01, prepare_seconds=0.001).drive(device="cuda", most=30)
    dear = Group(5, 1000, 1000, epoch_seconds=0.01, prepare_seconds=1e6).drive(device="cuda", most=30)
    assert [decision.drop for decision in cheap if decision.drop] == [("m0",)]
    assert not any(decision.drop for decision in dear)


def test_checkpoints_are_due_by_measured_seconds():
    decided = Group(1000, epoch_seconds=0.05).drive(options=RunOptions(checkpoint_every=1.0), period=10)
    assert [decision.epoch for decision in decided if decision.save][:3] == [20, 40, 60]
    always = Group(1000).drive(options=RunOptions(checkpoint_every=0.0), period=100)
    assert [decision.save for decision in always] == [False] + [True] * 10, "not before anything was trained"


def test_pruning_is_asked_at_fixed_epochs_among_peers():
    asked = []

    def policy(epoch, scores, running):
        asked.append((epoch, {name: len(values) for name, values in scores.items()}, list(running)))
        return ["m0"] if "m0" in running else []

    board = {"other": Member("other", 9, ("val_x",), "x", peers="elsewhere", rows=[(1.0,)])}
    group = Group(25, 25, epoch_seconds=0.001, peers="here")
    decided = group.drive(options=RunOptions(prune=policy), board=board)
    assert asked == [(10, {"m0": 10, "m1": 10}, ["m0", "m1"]), (20, {"m0": 10, "m1": 20}, ["m1"])]
    stops = [stop for decision in decided for stop in decision.stop]
    assert stops == [Stop("m0", "pruned", "task 'm0': pruned after epoch 10")]
    assert set(board) == {"other", "m0", "m1"}


def test_requests_from_outside():
    paused = Group(50, 50).drive(lambda epoch: Requests(pause=epoch >= 9), most=6)
    assert [(d.pause, d.save, d.advance) for d in paused[2:]] == [(True, True, 0), *[(True, False, 0)] * 3]
    for field, reason in (("preempt", "preempted"), ("interrupt", "interrupted")):
        *_, last = Group(50, 50).drive(lambda epoch, field=field: Requests(**{field: epoch >= 9}))
        assert (last.epoch, last.save, last.finish, last.reason) == (9, True, True, reason)
    *_, last = Group(50, 50).drive(lambda epoch: Requests(frozenset({"m1"}), cancel_all=epoch >= 9))
    assert [(stop.member, stop.status) for stop in last.stop] == [("m0", "cancelled")]
    assert (last.finish, last.reason) == (True, "")


def test_a_driver_that_comes_later_takes_over():
    group = Group(40)
    group.drive(period=10, most=3)
    asked = []
    policy = lambda *arguments: asked.append(arguments)  # noqa: E731
    later = Driver(group.members, RunOptions(prune=policy, checkpoint_every=1.0), period=10)
    decision = later.decide(Progress(group.epoch, 9.0))
    assert (decision.epoch, decision.advance, decision.save, asked) == (20, 10, False, [])
