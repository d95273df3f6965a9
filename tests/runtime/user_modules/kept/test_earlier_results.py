"""Results of earlier calls outside of a module: those of the graph do no harm, those of the weights are not resumed."""

from __future__ import annotations

import array
import functools

import pytest
import torch
from torch import nn

import weft
from tests.runtime.user_modules.odd_modules import Base
from tests.runtime.user_modules.test_exact import GRAPH, plain, preempted_after, run, tasks_of

SCALES: dict = {}
SCALE = None
SEEN: list = []
DEGREES: dict = {}


class InTable(Base):
    def forward(self, x, adj):
        if "scale" not in SCALES:
            SCALES["scale"] = float(self.last.weight.abs().sum())
        return super().forward(x, adj) * SCALES["scale"]


class InTableByModule(Base):
    def forward(self, x, adj):
        if id(self) not in SCALES:
            SCALES[id(self)] = float(self.last.weight.abs().sum())
        return super().forward(x, adj) * SCALES[id(self)]


class InVariable(Base):
    def forward(self, x, adj):
        global SCALE
        if SCALE is None:
            SCALE = float(self.last.weight.abs().sum())
        return super().forward(x, adj) * SCALE


class InClass(Base):
    scale = None

    def forward(self, x, adj):
        if InClass.scale is None:
            InClass.scale = float(self.last.weight.abs().sum())
        return super().forward(x, adj) * InClass.scale


class CachedMethod(Base):
    @functools.lru_cache  # noqa: B019
    def scale(self):
        return float(self.last.weight.abs().sum())

    def forward(self, x, adj):
        return super().forward(x, adj) * self.scale()


class CachedFunction(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return self.last(h) + h @ copied(self.last.weight).T


@functools.cache
def copied(weight):
    return weight.detach().clone()


class CachedDraws(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return self.last(h + h @ drawn(8))


@functools.cache
def drawn(n):
    return torch.randn(n, n)


class CachedAttribute(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        weight = self.last.weight
        self.scale = functools.lru_cache(lambda: float(weight.abs().sum()))

    def forward(self, x, adj):
        return super().forward(x, adj) * self.scale()


FROM_WEIGHTS = {
    InTable: "SCALES",
    InTableByModule: "SCALES",
    InVariable: "SCALE",
    InClass: "InClass.scale",
    CachedMethod: "something outside",
    CachedFunction: "something outside",
    CachedDraws: "something outside",
    CachedAttribute: "scale",
}


def forget():
    global SCALE
    SCALES.clear()
    SCALE = InClass.scale = None
    copied.cache_clear()
    drawn.cache_clear()
    CachedMethod.scale.cache_clear()


@pytest.mark.parametrize(("model", "name"), FROM_WEIGHTS.items())
def test_what_a_first_call_made_of_weights_is_a_plain_loop_and_is_said(model, name, tmp_path, monkeypatch):
    (task,), notes = tasks_of(model, [0]), []
    forget()
    result = run(task, on_event=lambda e: notes.append(e.data["message"]) if e.kind == "note" else 0)
    assert any(f"keeps '{name}" in note or f"keeps {name}" in note for note in notes), notes
    forget()
    assert result.history["loss"] == pytest.approx(plain(model)[0], rel=2e-4, abs=2e-5)
    forget()
    preempted_after(6, task, tmp_path / "run", monkeypatch)
    with pytest.raises(weft.SpecError, match=f"keeps '{name}.* cannot be resumed"):
        run(task, out=tmp_path / "run", resume=True)
    forget()


class Degrees(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.last = nn.Linear(i, o)

    def forward(self, x, edge_index):
        nodes = x.shape[0]
        if "degrees" not in DEGREES:
            DEGREES["degrees"] = torch.bincount(edge_index[1], minlength=nodes).clamp(min=1)
        return self.last(x / DEGREES["degrees"][:, None])


class Notes(Base):
    """Reads none of what it leaves, but its form."""

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        SEEN.append(h.detach())
        return self.last(h + SEEN[0][:, :1].isnan())


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("model", [Degrees, Notes])
def test_what_a_dry_run_leaves_is_not_found_by_the_run(model, seeds):
    DEGREES.clear()
    SEEN.clear()
    for result in run(tasks_of(model, range(seeds), epochs=3)):
        assert result.status == "finished"
    assert not any(one.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(one) for one in SEEN[:1])


def test_a_plan_leaves_nothing_outside():
    DEGREES.clear()
    SEEN.clear()
    weft.plan([*tasks_of(Degrees, [0]), *tasks_of(Notes, [0])], machine="h200")
    assert not DEGREES
    assert not SEEN


class InArray(Base):
    """Of the standard library, written in C."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.calls = array.array("d", [0.0])

    def forward(self, x, adj):
        self.calls[0] += self.training
        return super().forward(x, adj) * (1 + 0.1 * self.calls[0])


def test_what_no_file_holds_is_said_and_not_predicted_with(tmp_path, monkeypatch):
    (task,), notes = tasks_of(InArray, [0]), []
    run(task, out=tmp_path / "run", on_event=lambda e: notes.append(e.data["message"]) if e.kind == "note" else 0)
    said = [one for one in notes if "keeps 'calls' between calls, which is not plain data" in one]
    assert len(said) == 1, notes
    assert "a result that is loaded does not predict" in said[0]
    with pytest.raises(weft.SpecError, match=r"keeps 'calls' between calls, .* its predictions depend on it"):
        weft.read(tmp_path / "run", model=InArray, graph=GRAPH).predict()
    preempted_after(6, task, tmp_path / "again", monkeypatch)
    with pytest.raises(
        weft.SpecError, match="keeps 'calls' between calls, which is not plain data and in no checkpoint"
    ):
        run(task, out=tmp_path / "again", resume=True)


class InLibrary(Base):
    def forward(self, x, adj):
        weft.nn.calls = getattr(weft.nn, "calls", 0) + 1
        return super().forward(x, adj) * (1 + 0.1 * weft.nn.calls)


def test_what_weft_does_not_see_is_said():
    notes = []
    try:
        run(tasks_of(InLibrary, [0], epochs=2), on_event=lambda e: notes.append(str(e.data)) if e.kind == "note" else 0)
    finally:
        del weft.nn.calls
    said = [one for one in notes if "keeps something outside of its attributes" in one]
    assert len(said) == 1, notes
    assert "Weft's calls before the first epoch have advanced it" in said[0]


class NeedsGenerator(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.factors = (1 + 0.1 * k for k in range(1000))

    def forward(self, x, adj):
        return super().forward(x, adj) * next(self.factors)


def test_what_cannot_be_copied_and_is_needed_is_refused_by_name():
    with pytest.raises(weft.SpecError, match="it needs 'factors', of which Python makes no copy"):
        run(tasks_of(NeedsGenerator, [0]))
