"""What a module reaches or changes of its inputs, whichever way: refused, or its edges are left to PyG."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.runtime.user_modules.test_converting import run
from weft.core.errors import SpecError
from weft.runtime.step.preflight import CallRecorder

pyg = pytest.importorskip("torch_geometric.nn")


@pytest.mark.parametrize(("touch", "changed"), [
    (lambda x: x + 1, []),
    (lambda x: x.data, []),
    (lambda x: x.numpy(), []),
    (lambda x: x.add_(1), ["x"]),
    (lambda x: x.data.add_(1), ["x"]),
    (lambda x: x.numpy().__setitem__(0, 5), ["x"]),
    (lambda x: setattr(x, "data", x[:1].clone()), ["x"]),
    (lambda x: x[1:].data.add_(1), ["x"]),
    (lambda x: x[:2].numpy().__setitem__(0, 5), ["x"]),
    (lambda x: x[:2].numpy(), []),
    (lambda x: x.clone().data.add_(1), []),
])  # fmt: skip
def test_changes_are_named(touch, changed):
    x, other = torch.tensor([1.0, float("nan"), 3.0]), torch.arange(3)
    recorder = CallRecorder(nn.Module(), {"x": x, "other": other})
    with recorder:
        touch(x)
    assert sorted(recorder.changed_inputs) == changed


class Touches(nn.Module):
    """Reaches the memory of its edges in a way that torch does not count; a subclass changes them there."""

    def __init__(self, i, o):
        super().__init__()
        self.first, self.second = pyg.GCNConv(i, 8), pyg.GCNConv(8, o)

    def touch(self, edge_index):
        return edge_index.data

    def forward(self, x, edge_index):
        x = torch.relu(self.first(x, edge_index))
        self.touch(edge_index)
        return self.second(x, edge_index)


class TouchesByNumpy(Touches):
    def touch(self, edge_index):
        return edge_index.numpy()


class Turns(Touches):
    """Every call turns the edges of the next one around."""

    def touch(self, edge_index):
        memory = super().touch(edge_index)
        memory[:] = memory.flip(0)


class TurnsByNumpy(TouchesByNumpy):
    def touch(self, edge_index):
        memory = super().touch(edge_index)
        memory[:] = memory[::-1].copy()


class TurnsCounted(Touches):
    def touch(self, edge_index):
        edge_index.copy_(edge_index.flip(0))


class TurnsCopy(Touches):
    """Its second layer has the edges turned around, through the memory of a tensor of its own."""

    def forward(self, x, edge_index):
        own = edge_index.clone()
        x = torch.relu(self.first(x, own))
        own.data[:] = own.flip(0)
        return self.second(x, own)


@pytest.mark.parametrize("model", [Touches, TouchesByNumpy, TurnsCopy])
def test_edges_whose_memory_is_reached_are_left_to_pyg(model):
    (mine, _), (plain, _) = run(model), run(model, convert=False)
    assert mine[0].history["loss"] == pytest.approx(plain[0].history["loss"], rel=1e-5)


class ReachesItsWeights(Touches):
    """The memory of a parameter is not that of the edges."""

    def touch(self, edge_index):
        self.first.lin.weight.data.clamp_(-1.0, 1.0)


def test_a_module_that_reaches_its_weights_trains_with_converted_layers(monkeypatch):
    from weft.nn.pyg.swapped_layers import WeftGCNConv

    calls = []
    covered = WeftGCNConv.covered
    note = lambda layer, *given, **more: calls.append(covered(layer, *given, **more)) or calls[-1]  # noqa: E731
    monkeypatch.setattr(WeftGCNConv, "covered", note)
    (mine, notes), (plain, _) = run(ReachesItsWeights), run(ReachesItsWeights, convert=False)
    assert any(words.startswith("converted: 2 GCNConv") for words in notes)
    assert calls
    assert all(adj is not None for adj in calls), "trials of the module do not take its edges from the layers"
    assert mine[0].history["loss"] == pytest.approx(plain[0].history["loss"], rel=1e-4)


@pytest.mark.parametrize("model", [Turns, TurnsByNumpy, TurnsCounted])
@pytest.mark.parametrize("convert", [None, False])
def test_a_module_that_changes_what_it_is_given_is_refused(model, convert):
    with pytest.raises(SpecError, match=r"changes edge_index in place, .* edge_index = edge_index.clone\(\)"):
        run(model, convert=convert)
