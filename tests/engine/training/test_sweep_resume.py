"""weft.run(sweep, out=..., resume=True): what was finished stays, the rest goes on; one run at a time in a folder."""

from __future__ import annotations

import json

import pytest
import torch

import weft
from tests.engine.small_sweeps import make_sweep, of_kind
from weft.core.errors import SpecError, TrainingError
from weft.core.sweep import Sweep
from weft.engine.control import Control
from weft.engine.run import run
from weft.runtime.checkpoint import read_checkpoint
from weft.runtime.group import GroupRun


class Killed(BaseException):
    """Raised from a listener to leave a run in the middle."""


class TestResume:
    @pytest.mark.parametrize("leaving", [False, True])
    def test_interrupted_and_resumed_is_uninterrupted(self, tmp_path, monkeypatch, leaving):
        """With members that have ended in the step to the last, and with members that leave it at once."""
        monkeypatch.setattr("weft.engine.driver.LEAVE_EVERY", 1 if leaving else 1000)
        sweep = make_sweep(model=["gcn", "sage"], hidden=[4, 8], dropout=0.5, epochs=[6, 30], norm="batch")
        whole = run(sweep, progress=False)

        def listen(event):
            if event.kind == "checkpoint" and event.data["epoch"] >= 9 and "groups/2" in event.data["path"]:
                raise Killed

        with pytest.raises(Killed):
            run(sweep, progress=False, out=tmp_path, on_event=listen, options=weft.RunOptions(checkpoint_every=0.0))
        assert 9 <= read_checkpoint(tmp_path / "groups" / "2").about["epoch"] < 30
        events = []
        parts = run(sweep, progress=False, out=tmp_path, resume=True, on_event=events.append)
        for one, other in zip(whole, parts, strict=True):
            assert one.history["loss"] == other.history["loss"], one.name
            for name, weight in one.model.state_dict().items():
                assert torch.equal(weight, other.model.state_dict()[name]), (one.name, name)
        assert of_kind(events, "start")
        assert len(of_kind(events, "end")) == 8

    def test_finished_members_are_not_trained_again(self, tmp_path, monkeypatch):
        sweep = make_sweep(seed=[0, 1], lr=[0.1, 1e30], optimizer="sgd")
        first = run(sweep, progress=False, out=tmp_path)
        monkeypatch.setattr(GroupRun, "advance", lambda *_: pytest.fail("trained again"))
        second = run(sweep, progress=False, out=tmp_path, resume=True)
        assert [member.status for member in first] == [member.status for member in second]
        assert [member.message for member in first] == [member.message for member in second]
        assert [member.metrics["seconds"] for member in first] == [member.metrics["seconds"] for member in second]

    def test_pruned_members_stay_pruned(self, tmp_path):
        def policy(epoch, scores, running):
            return [name for name in running if name == "seed=1"]

        sweep = make_sweep(seed=[0, 1], epochs=25)
        first = run(sweep, progress=False, out=tmp_path, options=weft.RunOptions(prune=policy))
        second = run(sweep, progress=False, out=tmp_path, resume=True)
        assert [member.status for member in second] == ["finished", "pruned"]
        assert second["seed=1"].history["loss"] == first["seed=1"].history["loss"]

    def test_another_sweep_or_a_task_is_refused(self, tmp_path):
        run(make_sweep(seed=[0, 1], epochs=2), progress=False, out=tmp_path)
        with pytest.raises(SpecError, match=r"sweep\.json: was trained with lr=0\.01, but this task has lr=0\.5"):
            run(make_sweep(seed=[0, 1], epochs=2, lr=0.5), progress=False, out=tmp_path, resume=True)
        with pytest.raises(SpecError, match="has 2 tasks, but this sweep has 3"):
            run(make_sweep(seed=[0, 1, 2], epochs=2), progress=False, out=tmp_path, resume=True)
        with pytest.raises(SpecError, match="holds a sweep, not one task"):
            run(make_sweep(epochs=2).tasks()[0], progress=False, out=tmp_path, resume=True)
        run(make_sweep(epochs=2).tasks()[0], progress=False, out=tmp_path / "one")
        with pytest.raises(SpecError, match="holds the run of one task"):
            run(make_sweep(seed=[0, 1], epochs=2), progress=False, out=tmp_path / "one", resume=True)

    def test_starting_afresh_forgets_the_former_sweep_and_nothing_else(self, tmp_path):
        run(make_sweep(seed=[0, 1, 2], epochs=2), progress=False, out=tmp_path)
        (tmp_path / "tasks" / "seed=2" / "mine.txt").write_text("notes")
        run(make_sweep(seed=[0, 1], epochs=2), progress=False, out=tmp_path, overwrite=True)
        assert sorted(path.name for path in (tmp_path / "tasks").iterdir()) == ["seed=0", "seed=1", "seed=2"]
        assert [path.name for path in (tmp_path / "tasks" / "seed=2").iterdir()] == ["mine.txt"]

    def test_a_damaged_file_is_named(self, tmp_path):
        run(make_sweep(seed=[0, 1], epochs=2), progress=False, out=tmp_path)
        (tmp_path / "sweep.json").write_text("{")
        with pytest.raises(SpecError, match=r"sweep\.json: damaged"):
            run(make_sweep(seed=[0, 1], epochs=2), progress=False, out=tmp_path, resume=True)
        (tmp_path / "sweep.json").write_text('{"format": 99}')
        with pytest.raises(SpecError, match=r"sweep\.json: has format 99, and this version of Weft reads up to 1"):
            run(make_sweep(seed=[0, 1], epochs=2), progress=False, out=tmp_path, resume=True)

    def test_without_a_former_run_it_starts_afresh_and_says_so(self, tmp_path):
        events = []
        run(make_sweep(seed=[0, 1], epochs=2), progress=False, out=tmp_path, resume=True, on_event=events.append)
        assert any("starting afresh" in event.data.get("message", "") for event in events)

    def test_what_had_finished_is_not_lost_to_a_cancellation(self, tmp_path):
        sweep = Sweep(["demo", "shape:cora"], epochs=2, seed=range(2))
        first, cancel = run(sweep, progress=False, out=tmp_path), Control()
        cancel.cancel(*(task.label for task in sweep if task.graph == "demo"))
        again = run(sweep, progress=False, out=tmp_path, resume=True, control=cancel)
        assert again.statuses == {"finished": 4}
        for one, other in zip(first, again, strict=True):
            assert one.metrics["val_accuracy"] == other.metrics["val_accuracy"]
        kept = json.loads((tmp_path / "tasks" / "demo_seed=0" / "result.json").read_text())
        assert (kept["status"], kept["metrics"]["epochs_run"]) == ("finished", 2)

    def test_two_runs_do_not_write_into_one_folder(self, tmp_path):
        sweep, refused = make_sweep(seed=range(2)), []

        def meanwhile(event):
            if event.kind == "group":
                with pytest.raises(SpecError, match="another run is writing there; wait for it, or choose another"):
                    run(make_sweep(seed=range(3)), progress=False, out=tmp_path)
                refused.append(event)

        run(sweep, progress=False, out=tmp_path, on_event=meanwhile)
        assert len(refused) == 1
        assert len(json.loads((tmp_path / "result.json").read_text())["tasks"]) == 2
        assert len(run(make_sweep(seed=range(3)), progress=False, out=tmp_path, overwrite=True)) == 3, "once it is over"
        assert not (tmp_path / ".lock").exists()

    def test_a_full_disk_is_one_sentence(self, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("weft.engine.page.render_sweep_report", full)
        events = []
        with pytest.raises(TrainingError, match="No space left on device"):
            run(make_sweep(seed=[0, 1], epochs=2), progress=False, out=tmp_path, on_event=events.append)
        assert events[-1].kind == "failed"
