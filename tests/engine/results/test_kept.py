"""What a user's module keeps in Python comes back as it was when its best weights were evaluated."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save
from torch.nn import functional as F

import weft
from tests.runtime.user_modules.odd_modules import Base
from tests.runtime.user_modules.test_exact import preempted_after
from tests.runtime.user_modules.test_kept_elsewhere import Teacher
from weft.core.errors import SpecError

GRAPH = "demo"


class RunningMean(Base):
    """Divides by a mean that it counts in an attribute, in training alone."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.mean, self.calls = 1.0, []

    def forward(self, x, adj):
        out = super().forward(x, adj)
        if self.training:
            self.mean = 0.5 * self.mean + 3.0 * float(out.detach().abs().mean())
            self.calls.append(len(self.calls))
        return out / self.mean


class LastOutput(Base):
    """Adds what its last training step gave, and counts evaluations."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.before, self.evaluated = None, 0

    def forward(self, x, adj):
        out = super().forward(x, adj)
        if self.training:
            self.before = out.detach().mean(0)
            return out
        self.evaluated += 1
        return out if self.before is None else out + self.before * self.evaluated


class LastOutputAlone(Base):
    """Evaluates with the mean of its last training step, which nothing else reads."""

    def forward(self, x, adj):
        out = super().forward(x, adj)
        if self.training:
            self.before = out.detach().mean(0)
            return out
        return out + getattr(self, "before", 0.0)


class Counter:
    count = 0


class OwnObject(Base):
    """Counts in an object of its own."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.own = Counter()

    def forward(self, x, adj):
        self.own.count += 1
        return super().forward(x, adj) * (1.0 + 0.2 * (self.own.count % 7))


class Opaque(Base):
    """Keeps an object that no file can hold."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.own = (number for number in range(10_000))

    def forward(self, x, adj):
        return super().forward(x, adj) * (1.0 + 0.01 * (next(self.own) if self.training else 0))


MODELS = [RunningMean, LastOutput, LastOutputAlone, Teacher]


def task_of(model) -> weft.Task:
    return weft.Task(graph=GRAPH, model=model, epochs=12, lr=0.3, name="one")


def val_loss(result) -> float:
    graph = weft.load(GRAPH)
    return float(F.cross_entropy(result.predict_logits(nodes="val"), graph.y[graph.val]))


@pytest.mark.parametrize("model", MODELS)
def test_a_prediction_is_the_evaluation_of_the_best_epoch(model, tmp_path):
    result = weft.run(task_of(model), device="cpu", progress=False, out=tmp_path / "run")
    assert result.metrics["best_epoch"] < 12, "else the end of training is the best epoch"
    again = weft.read(tmp_path / "run", model=model)
    logits = again.predict_logits(nodes="val")
    assert val_loss(result) == pytest.approx(result.metrics["val_loss"], rel=1e-5)
    fresh = weft.read(tmp_path / "run", model=model)
    assert torch.equal(fresh.predict_logits(nodes="val"), logits)
    assert val_loss(weft.read(tmp_path / "run", model=model)) == pytest.approx(result.metrics["val_loss"], rel=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_it_is_in_checkpoints(model, tmp_path, monkeypatch):
    whole = weft.run(task_of(model), device="cpu", progress=False)
    preempted_after(whole.metrics["best_epoch"], task_of(model), tmp_path / "run", monkeypatch)
    resumed = weft.run(task_of(model), device="cpu", progress=False, out=tmp_path / "run", resume=True)
    assert resumed.metrics["best_epoch"] == whole.metrics["best_epoch"]
    assert torch.equal(resumed.predict_logits(nodes="val"), whole.predict_logits(nodes="val"))


def test_what_is_not_plain_data_is_refused_by_its_name(tmp_path):
    weft.run(task_of(OwnObject), device="cpu", progress=False, out=tmp_path / "run")
    with pytest.raises(SpecError, match=r"keeps 'own' between calls, which is not plain data.*get_extra_state"):
        weft.read(tmp_path / "run", model=OwnObject).predict_logits(nodes="val")


def test_weights_without_what_belongs_to_them_are_refused(tmp_path):
    weft.run(task_of(RunningMean), device="cpu", progress=False, out=tmp_path / "run")
    (tmp_path / "run" / "kept.safetensors").unlink()
    with pytest.raises(SpecError, match=r"kept\.safetensors: cannot be read"):
        weft.read(tmp_path / "run", model=RunningMean)


def test_a_run_without_it_leaves_no_file_of_an_earlier_one(tmp_path):
    weft.run(task_of(RunningMean), device="cpu", progress=False, out=tmp_path / "run")
    assert (tmp_path / "run" / "kept.safetensors").is_file()
    weft.run(task_of("gcn"), device="cpu", progress=False, out=tmp_path / "run", overwrite=True)
    assert not (tmp_path / "run" / "kept.safetensors").exists()


@pytest.mark.parametrize(("model", "told"), [(Opaque, True), (RunningMean, False)])
def test_other_objects_are_said(model, told):
    notes = []
    on_event = lambda event: notes.append(event.data["message"]) if event.kind == "note" else None  # noqa: E731
    weft.run(task_of(model), device="cpu", progress=False, on_event=on_event)
    assert any("which is not plain data: it trains alone and eagerly" in note for note in notes) == told


OF_ANOTHER = {"module_state": torch.tensor(list(b'{"trees": {"gone.mean": 1.0}}'), dtype=torch.uint8)}


@pytest.mark.parametrize("content", [b"torn", save(OF_ANOTHER)])
def test_what_cannot_be_given_back_is_one_sentence(content, tmp_path):
    weft.run(task_of(RunningMean), device="cpu", progress=False, out=tmp_path / "run")
    (tmp_path / "run" / "kept.safetensors").write_bytes(content)
    with pytest.raises(SpecError, match=r"kept\.safetensors: (cannot be read|does not fit)"):
        _ = weft.read(tmp_path / "run", model=RunningMean).model
