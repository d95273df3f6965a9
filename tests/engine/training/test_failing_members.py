"""Modules of one's own that raise while they train, or cannot be copied: each costs itself and nobody else."""

from __future__ import annotations

import json
import textwrap

import pytest
from torch import nn

from tests.engine.small_sweeps import make_sweep, of_kind
from weft.core.errors import ModelError, TrainingError
from weft.engine.run import run
from weft.runtime.group import GroupRun

FILE = """
    from torch import nn

    class Fine(nn.Linear):
        pass

    class Failing(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.layer, self.calls = nn.Linear(i, o), 0

        def forward(self, x):
            if self.training:
                self.calls += 1
                if self.calls > 5:
                    raise ValueError("no more\\nand a second line")
            return self.layer(x)
"""


@pytest.fixture
def net(tmp_path):
    path = tmp_path / "my_net.py"
    path.write_text(textwrap.dedent(FILE))
    return path


class FailsBackward(nn.Module):
    """Raises in its backward pass, where no line of its own is on the way."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.layer = nn.Linear(in_features, out_features)

    def forward(self, x):
        x = self.layer(x).exp()
        y = x * 2
        if self.training:
            x.add_(1)
        return y


def test_one_member_fails_alone(net, tmp_path):
    models = [f"{net}:Fine", f"{net}:Failing", "gcn"]
    events = []
    result = run(make_sweep(model=models), progress=False, out=tmp_path / "run", on_event=events.append)
    assert [member.status for member in result] == ["finished", "failed", "finished"]
    message = result[1].message
    assert f"raised ValueError: no more (line 16 of {net})" in message
    assert "\n" not in message
    saved = json.loads(next((tmp_path / "run" / "tasks").glob("*Failing*/result.json")).read_text())
    assert (saved["status"], saved["message"]) == ("failed", message)
    assert len(list((tmp_path / "run" / "tasks").glob("*/model.safetensors"))) == 2
    assert {event.data["status"] for event in of_kind(events, "end")} == {"finished", "failed"}
    alone = run(make_sweep(model=models[:1]).tasks()[0], progress=False)
    assert result[0].history["loss"] == alone.history["loss"]


def test_a_group_is_halved_until_the_failing_member_is_alone(monkeypatch):
    real, sizes = GroupRun.advance, []

    def picky(group, *rest):
        sizes.append(len(group.tasks))
        if any(task.seed == 2 for task in group.tasks):
            raise RuntimeError("seed 2")
        return real(group, *rest)

    monkeypatch.setattr(GroupRun, "advance", picky)
    events = []
    result = run(make_sweep(model=nn.Linear, seed=range(4)), progress=False, on_event=events.append)
    assert result.statuses == {"finished": 3, "failed": 1}
    assert result["seed=2"].status == "failed"
    assert sizes[0] == 4
    assert any("4 tasks ('seed=0', ...): model" in note.data["message"] for note in of_kind(events, "note"))


def test_faults_of_ours_are_not_blamed_on_a_model(monkeypatch):
    monkeypatch.setattr(GroupRun, "advance", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(make_sweep(seed=[0, 1]), progress=False)


def test_one_task_is_one_sentence_and_all_failing_is_an_error(net):
    task = make_sweep(model=f"{net}:Failing").tasks()[0]
    events = []
    with pytest.raises(TrainingError, match=r"task '.*': model .* raised ValueError: no more \(line 16 of") as caught:
        run(task, progress=False, on_event=events.append)
    assert caught.value.exit_code == 3
    assert (events[-1].kind, events[-1].data["status"]) == ("failed", "failed")
    with pytest.raises(TrainingError, match="no more"):
        run(make_sweep(model=f"{net}:Failing", seed=[0, 1]), progress=False)


def test_an_error_of_the_backward_pass_names_the_class():
    with pytest.raises(
        ModelError, match=r"raised RuntimeError: .* \(its class is at line \d+ of .*test_failing_members"
    ):
        run(make_sweep(model=FailsBackward).tasks()[0], progress=False)


def test_a_model_that_cannot_be_copied_costs_that_model_alone(monkeypatch, tmp_path):
    real = GroupRun.best_model

    def stubborn(group, index):
        if group.tasks[index].seed == 1:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")
        return real(group, index)

    monkeypatch.setattr(GroupRun, "best_model", stubborn)
    events = []
    sweep = make_sweep(model=nn.Linear, seed=range(3))
    result = run(sweep, progress=False, out=tmp_path, on_event=events.append)
    assert result.statuses == {"finished": 3}
    assert [member.model is None for member in result] == [False, True, False]
    assert "its model could not be copied, so there are no weights: model" in result[1].message
    assert len(result[1].history["loss"]) == 12
    assert len(list((tmp_path / "tasks").glob("*/model.safetensors"))) == 2
    assert any("could not be copied" in note.data["message"] for note in of_kind(events, "note"))
