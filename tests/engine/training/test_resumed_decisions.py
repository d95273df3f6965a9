"""What was decided before the first epoch is not decided again by a run that is resumed: it has the same bits."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import nn
from torch.nn import functional as F

import weft
from weft.core.errors import SpecError
from weft.runtime import group as group_build
from weft.runtime.checkpoint import read_checkpoint, write_checkpoint
from weft.runtime.modules import convert as converting
from weft.runtime.modules.convert import STACKS
from weft.runtime.step import preflight as trying

pyg = pytest.importorskip("torch_geometric.nn")
EPOCHS, LEFT_AFTER = 12, 4
ONE, STACK = (0,), (0, 1)


class Killed(BaseException):
    """Raised from a listener to leave a run in the middle."""


class Net(nn.Module):
    """Two layers that Weft has operators for."""

    def __init__(self, i, o):
        super().__init__()
        self.first, self.second = pyg.GCNConv(i, 16), pyg.SAGEConv(16, o)

    def forward(self, x, edge_index):
        x = F.dropout(torch.relu(self.first(x, edge_index)), 0.4, self.training)
        return self.second(x, edge_index)


def graph_of(sparse=False) -> weft.Graph:
    draw = np.random.default_rng(0)
    src, dst = draw.integers(0, 200, (2, 1600))
    x = (draw.normal(size=(200, 24)) * (draw.random((200, 24)) < (0.1 if sparse else 1.0))).astype("float32")
    given, y = scipy.sparse.csr_matrix(x) if sparse else x, draw.integers(0, 3, 200)
    graph = weft.Graph.from_edges(src, dst, num_nodes=200, x=given, y=y, directed=False)
    return graph.random_split(0.5, 0.25)


GRAPH = graph_of()


def run(seeds=STACK, graph=GRAPH, model=Net, convert=None, notes=None, **options):
    """The results of one task, or of one per seed."""
    about = {"graph": graph, "model": model, "epochs": EPOCHS, "convert": convert}
    tasks = [weft.Task(**about, seed=seed, name=f"s{seed}") for seed in seeds]

    def listen(event):
        if event.kind == "note" and notes is not None:
            notes.append(event.data["message"])

    given = {"device": "cpu", "progress": False, "on_event": listen, **options}
    return [weft.run(tasks[0], **given)] if len(tasks) == 1 else list(weft.run(tasks, **given))


def interrupted(folder, seeds=STACK, **options) -> None:
    """Leave a run after a few epochs."""

    def listen(event):
        if event.kind == "checkpoint" and event.data["epoch"] >= LEFT_AFTER:
            raise Killed

    with pytest.raises(Killed):
        run(seeds, out=folder, options=weft.RunOptions(checkpoint_every=0.0), on_event=listen, **options)
    assert LEFT_AFTER <= checkpoint_in(folder).about["epoch"] < EPOCHS


def checkpoint_in(folder):
    return read_checkpoint(place_of(folder))


def place_of(folder):
    return folder / "groups" / "1" if (folder / "groups").exists() else folder


def equal(mine, theirs) -> bool:
    """Whether two runs have the same bits."""
    return all(
        one.history["loss"] == other.history["loss"]
        and all(torch.equal(one.model.state_dict()[n], w) for n, w in other.model.state_dict().items())
        for one, other in zip(mine, theirs, strict=True)
    )


def deny(patch) -> None:
    """From now on the installed PyG is none of those that were tested."""
    patch.setattr(converting, "TESTED", ("0.",))


def take_apart(patch) -> None:
    """From now on the members of a stack are said to be faster in turn."""
    patch.setattr(group_build, "slower_than_alone", lambda stack, plan: "it is slower")


@pytest.fixture(autouse=True)
def _no_clock(monkeypatch):
    """A busy machine takes no stack apart."""
    monkeypatch.setattr(group_build, "slower_than_alone", lambda stack, plan: None)


@pytest.mark.parametrize("first", [True, False], ids=["converted", "not converted"])
@pytest.mark.parametrize("case", ["one task", "stack", "in turn"])
def test_layers_are_converted_as_they_were(tmp_path, monkeypatch, case, first):
    seeds = ONE if case == "one task" else STACK
    with monkeypatch.context() as patch:
        if case == "in turn":
            take_apart(patch)
        if not first:
            deny(patch)
        whole = run(seeds)
        interrupted(tmp_path, seeds)
    with monkeypatch.context() as patch:
        if case == "in turn":
            take_apart(patch)
        if first:
            deny(patch)
        others = run(seeds)
        parts = run(seeds, out=tmp_path, resume=True)
    assert whole[0].plan.join == {"one task": "solo", "stack": "stacked", "in turn": "in turn"}[case]
    assert parts[0].plan.join == whole[0].plan.join
    assert equal(parts, whole)
    assert not equal(others, whole), "what is decided matters"


def test_nothing_is_decided_again_and_the_note_is_the_same(tmp_path, monkeypatch):
    before, after = [], []
    run(notes=before)
    interrupted(tmp_path)
    saved = checkpoint_in(tmp_path).about[STACKS]
    deny(monkeypatch)
    run(out=tmp_path, resume=True, notes=after)
    (told,), (again,) = ([one for one in notes if "converted" in one] for notes in (before, after))
    assert told.startswith("converted: 1 GCNConv and 1 SAGEConv of PyG compute with Weft's operators")
    assert again == told
    (stack,) = saved
    assert stack["members"] == [0, 1]
    assert stack["converted"] == {
        "layers": {"first": "GCNConv", "second": "SAGEConv"},
        "sparse": False,
        "note": again,
    }
    assert checkpoint_in(tmp_path).about[STACKS] == saved, "the resumed run saves it, too"


def test_a_stack_that_is_taken_apart_says_once_that_nothing_is_converted(monkeypatch):
    take_apart(monkeypatch)
    deny(monkeypatch)
    notes = []
    run(notes=notes)
    assert len([note for note in notes if note.startswith("not converted: ")]) == 1


def test_sparse_features_stay_as_they_were(tmp_path, monkeypatch):
    graph, notes, again = graph_of(sparse=True), [], []
    whole = run(ONE, graph, notes=notes)
    assert any("features stay sparse" in note for note in notes)
    interrupted(tmp_path, ONE, graph=graph)
    monkeypatch.setitem(trying.SPARSE, "fp32", -1.0)
    assert not equal(run(ONE, graph), whole), "what is decided matters"
    assert equal(run(ONE, graph, out=tmp_path, resume=True, notes=again), whole)
    assert [one for one in again if "converted" in one] == [one for one in notes if "converted" in one]


@pytest.mark.parametrize("first", [True, False], ids=["stacked", "alone"])
def test_members_share_a_step_as_they_did(tmp_path, monkeypatch, first):
    """Whether they have the numbers in a stack that they have alone may be within the noise of sums by atomics."""

    def alone(patch):
        patch.setattr(trying.Preflight, "_is_same", lambda *_: False)

    with monkeypatch.context() as patch:
        if not first:
            alone(patch)
        whole = run(convert=False)
        interrupted(tmp_path, convert=False)
    saved, notes = checkpoint_in(tmp_path).about[STACKS], []
    assert [one["members"] for one in saved] == ([[0, 1]] if first else [[0], [1]])
    with monkeypatch.context() as patch:
        if first:
            alone(patch)
        run(convert=False, out=tmp_path / "other")
        parts = run(convert=False, out=tmp_path, resume=True, notes=notes)
    assert equal(parts, whole)
    assert checkpoint_in(tmp_path).about[STACKS] == saved
    assert checkpoint_in(tmp_path / "other").about[STACKS] != saved, "it would be decided otherwise"
    assert ("2 tasks train as 2 stacks, not 1, as before" in notes) is not first


def test_a_checkpoint_from_before_decisions_were_kept_decides_anew(tmp_path, monkeypatch):
    interrupted(tmp_path, ONE)
    saved = checkpoint_in(tmp_path)
    write_checkpoint(place_of(tmp_path), saved.tensors, {k: v for k, v in saved.about.items() if k != STACKS})
    deny(monkeypatch)
    notes = []
    run(ONE, out=tmp_path, resume=True, notes=notes)
    assert any(note.startswith("not converted: ") for note in notes)


@pytest.mark.parametrize("seeds", [ONE, STACK])
def test_layers_that_can_no_longer_be_converted_are_refused_in_a_sentence(tmp_path, seeds):
    class Other(pyg.GCNConv):
        pass

    kinds = [pyg.GCNConv]

    def model(i, o):
        net = Net(i, o)
        net.first = kinds[-1](i, 16)
        return net

    interrupted(tmp_path, seeds, model=model)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    kinds.append(Other)
    with pytest.raises(SpecError) as error:
        run(seeds, model=model, out=tmp_path, resume=True)
    assert str(error.value) == (
        f"task 's0': was trained with GCNConv 'first' of model {_name(model)} on Weft's operators, which cannot be "
        "done again: Other has no counterpart in Weft; resume with what it was trained with, or choose another out= to "
        "start afresh"
    )
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "events.jsonl"}
    assert after == {path: data for path, data in before.items() if path.name != "events.jsonl"}
    kinds.pop()
    assert equal(run(seeds, model=model, out=tmp_path, resume=True), run(seeds, model=model))


def _name(model) -> str:
    return weft.Task(graph=GRAPH, model=model).model_name


def test_members_that_can_no_longer_share_a_step_are_refused_in_a_sentence(tmp_path):
    keeps = []

    class Counts(Net):
        count = 0

        def forward(self, x, edge_index):
            if keeps:
                self.count += 1
            return super().forward(x, edge_index)

    interrupted(tmp_path, model=Counts)
    keeps.append(1)
    with pytest.raises(SpecError, match="'s0', 's1': were trained as one stack, which cannot be done again: Counts"):
        run(model=Counts, out=tmp_path, resume=True)
    assert [one["key"] for one in json.loads((tmp_path / "sweep.json").read_text())["groups"]] == ["1"]
