"""Control: a run paused, resumed, cancelled and preempted from outside, in whichever thread it runs."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

from tests.engine.small_sweeps import make_sweep, of_kind
from weft.core.decision import Requests
from weft.core.run_options import RunOptions
from weft.core.task import Task
from weft.engine import control as interrupt
from weft.engine.control import Control, Interrupted, interruptible
from weft.engine.run import run
from weft.graph.catalog.names import load
from weft.runtime.checkpoint import read_checkpoint


class InThread:
    """A run in a thread of its own, as a server would have it."""

    def __init__(self, work, **options):
        self.events, self.result, self.error = [], None, None
        self._arrived = threading.Condition()
        self.thread = threading.Thread(target=self._run, args=(work, options))
        self.thread.start()

    def _run(self, work, options):
        try:
            self.result = run(work, progress=False, on_event=self._take, **options)
        except BaseException as error:
            self.error = error

    def _take(self, event):
        with self._arrived:
            self.events.append(event)
            self._arrived.notify_all()

    def wait_for(self, kind):
        with self._arrived:
            assert self._arrived.wait_for(lambda: of_kind(self.events, kind), timeout=60), kind

    def end(self):
        self.thread.join(60)
        assert not self.thread.is_alive()
        assert self.error is None, self.error
        return self.result


def losses(result):
    return {member.name: member.history["loss"] for member in result}


def test_paused_and_resumed_is_uninterrupted(tmp_path):
    sweep, control = make_sweep(seed=[0, 1], epochs=300, dropout=0.5), Control()
    control.pause()
    running = InThread(sweep, control=control, out=tmp_path)
    running.wait_for("checkpoint")
    seen = len(running.events)
    time.sleep(0.2)
    assert len(running.events) == seen, "nothing happens while it is paused"
    assert control.paused
    control.resume()
    running.wait_for("resumed")
    running.wait_for("progress")
    control.pause()
    control.resume()
    assert losses(running.end()) == losses(run(sweep, progress=False))
    assert of_kind(running.events, "paused")[0].data["epoch"] == 0


def test_members_are_cancelled_while_it_is_paused():
    control = Control()
    control.pause()
    running = InThread(make_sweep(seed=[0, 1], epochs=30), control=control)
    running.wait_for("paused")
    control.cancel("seed=1")
    running.wait_for("end")
    control.resume()
    result = running.end()
    assert [member.status for member in result] == ["finished", "cancelled"]
    assert result["seed=1"].metrics["epochs_run"] == 0


@pytest.mark.parametrize("paused", [False, True])
def test_preempted_and_resumed_is_uninterrupted(tmp_path, paused):
    sweep, control = make_sweep(model=["gcn", "sage"], seed=[0, 1], epochs=400, dropout=0.5), Control()
    if paused:
        control.pause()
    running = InThread(sweep, control=control, out=tmp_path, options=RunOptions(checkpoint_every=1000.0))
    running.wait_for("paused" if paused else "progress")
    control.preempt()
    result = running.end()
    assert result.statuses == {"preempted": 4}
    assert "preempted" in result[0].message
    assert of_kind(running.events, "preempted")
    assert running.events[-1].data["status"] == "preempted"
    saved = json.loads((tmp_path / "result.json").read_text())
    assert saved["statuses"] == {"preempted": 4}
    whole = run(sweep, progress=False)
    control.resume()
    again = run(sweep, progress=False, out=tmp_path, resume=True, control=control)
    assert again.statuses == {"finished": 4}
    assert losses(again) == losses(whole)


def test_one_task_is_preempted(tmp_path):
    task, control = make_sweep(epochs=3000).tasks()[0], Control()

    def listen(event):
        if event.kind == "progress":
            control.preempt()

    result = run(task, progress=False, control=control, out=tmp_path, on_event=listen)
    assert result.status == "preempted"
    assert 0 < result.metrics["epochs_run"] < 3000
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "preempted"


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_a_second_signal_at_once_is_the_first_one_again(monkeypatch):
    """A terminal and a wrapper may both send it; one that comes later leaves at once."""
    control = Control()
    with interruptible(control):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert control.signal == signal.SIGINT
        monkeypatch.setattr(interrupt, "TWICE", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_goes_the_same_way_also_while_paused(tmp_path):
    control, before = Control(), signal.getsignal(signal.SIGINT)

    def listen(event):
        if event.kind == "paused":
            os.kill(os.getpid(), signal.SIGINT)

    control.pause()
    with pytest.raises(Interrupted, match="interrupted after epoch 0; checkpoint in") as caught:
        run(make_sweep(epochs=30).tasks()[0], progress=False, control=control, out=tmp_path, on_event=listen)
    assert caught.value.exit_code == 130
    assert signal.getsignal(signal.SIGINT) is before
    control.resume()
    again = run(make_sweep(epochs=30).tasks()[0], progress=False, control=control, out=tmp_path, resume=True)
    assert again.status == "finished"


def test_signals_are_left_alone_outside_of_the_main_thread():
    before = signal.getsignal(signal.SIGINT)
    seen = []
    control = Control()
    control.pause()
    running = InThread(make_sweep(seed=[0, 1]), control=control)
    running.wait_for("paused")
    seen.append(signal.getsignal(signal.SIGINT))
    control.resume()
    running.end()
    assert seen == [before]


def test_members_are_cancelled_by_name_or_all_of_them():
    control = Control()
    control.cancel("a")
    control.cancel("b")
    assert control.requests() == Requests(frozenset({"a", "b"}))
    assert [name for name in "ac" if control.requests().cancelled(name)] == ["a"]
    control.cancel()
    assert control.requests().cancel_all


def test_a_long_epoch_is_left_between_two_steps_and_resumed_there(tmp_path):
    """Sampled: preempted in the middle of an epoch, resumed to the numbers of a run that was left alone."""
    task = Task(graph=load("demo"), model="sage", hidden=8, epochs=4, batch=4, fanout=[3, 2])
    whole = run(task, progress=False, device="cpu")
    control = Control()
    preempted = InThread(task, out=tmp_path / "out", control=control, device="cpu")
    preempted.wait_for("progress")
    control.preempt()
    preempted.end()
    steps = int(read_checkpoint(tmp_path / "out").tensors["step"])
    resumed = run(task, progress=False, device="cpu", out=tmp_path / "out", resume=True)
    assert resumed.history["loss"] == whole.history["loss"], f"left after {steps} steps of an epoch"
