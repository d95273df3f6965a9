"""Converted layers are accepted for PyG's rounding errors, whatever those do, and for no others."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.runtime.user_modules import test_converting as cases
from weft.runtime.modules import convert as converting
from weft.runtime.modules.convert import FLOOR, Measures, judge
from weft.runtime.step import conversion

pyg = pytest.importorskip("torch_geometric.nn")
from weft.nn.pyg import swapped_layers  # noqa: E402

TENSORS = 6
MEASURES = Measures(
    errors=lambda mine, true: [abs(one - other) for one, other in zip(mine, true, strict=True)],
    apart=lambda mine, true: max(abs(one - other) for one, other in zip(mine, true, strict=True)),
    near=1e-4,
    most=1e-3,
)


def steps(seed: int, rate: float, wrong: float = 0.0):
    """Numbers near 1 with rounding errors, and at a rate of ``rate`` per tensor jumps of 1e-4."""
    draw = random.Random(seed)

    def step(point: int) -> list[float]:
        jumps = [sum(draw.random() < rate / 8 for _ in range(8)) for _ in range(TENSORS)]
        return [1.0 + wrong + draw.gauss(0, 1e-7) + jump * draw.uniform(-2e-4, 2e-4) for jump in jumps]

    return step


def exact(point: int) -> list[float]:
    return [1.0] * TENSORS


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 1.0, 3.0])
def test_jumps_of_gradients_are_told_from_wrong_ones(rate):
    found = [judge(steps(2 * seed, rate), steps(2 * seed + 1, rate), exact, MEASURES) for seed in range(200)]
    assert sum(verdict.equal for verdict in found) >= 196


@pytest.mark.parametrize("wrong", [3e-5, 1e-4, 1e-3, 1e-1])
def test_an_error_at_all_weights_is_refused(wrong):
    found = [judge(steps(2 * seed, 0.0), steps(2 * seed + 1, 0.0, wrong), exact, MEASURES) for seed in range(20)]
    assert not any(verdict.equal for verdict in found)
    assert found[0].mine == pytest.approx(wrong, rel=0.1)


def test_numbers_that_are_the_same_need_no_reference():
    def never(point):
        raise AssertionError

    assert judge(exact, lambda point: [1.0 + 0.4 * FLOOR] * TENSORS, never, MEASURES).equal


@pytest.mark.parametrize("reference", [None, [2.0] * TENSORS, [float("nan")] * TENSORS])
def test_without_a_reference_the_noise_of_pyg_decides(reference):
    """Also with one that is not of the same function: in float64 a module may draw other numbers."""
    noisy = iter([[1.0] * TENSORS, *([1.0 + 2e-4] * TENSORS,) * 8])
    verdict = judge(lambda point: next(noisy), lambda point: [1 + 3e-4] * TENSORS, lambda point: reference, MEASURES)
    assert verdict.equal
    assert verdict.noise == pytest.approx(2e-4)
    assert not judge(exact, lambda point: [1 + 3e-4] * TENSORS, lambda point: reference, MEASURES).equal


# ---- whole runs ----------------------------------------------------------------------------------


class Centred(nn.Module):
    """What it classifies by is a small part of means that are large, so that float32 is off by some 1e-5."""

    def __init__(self, i, o):
        super().__init__()
        self.first, self.second, self.last = pyg.SAGEConv(i, 16), pyg.SAGEConv(16, 16), nn.Linear(16, o)

    def forward(self, x, edge_index):
        h = self.first(x + 300.0, edge_index)
        h = F.relu(h - h.mean(0))
        return self.last(self.second(h, edge_index))


def verdicts(monkeypatch) -> list:
    """All that later runs come to."""
    found, plain = [], converting.judge

    def judged(*given):
        found.append(plain(*given))
        return found[-1]

    monkeypatch.setattr(converting, "judge", judged)
    return found


def random_order(monkeypatch) -> None:
    """Sums of PyG as by atomics: in another order in every call."""
    plain, draw = pyg.SAGEConv.forward, torch.Generator().manual_seed(0)

    def forward(self, x, edge_index, size=None):
        return plain(self, x, edge_index[:, torch.randperm(edge_index.shape[1], generator=draw)], size)

    monkeypatch.setattr(pyg.SAGEConv, "forward", forward)


def test_layers_that_add_up_in_any_order_are_converted_every_time(monkeypatch):
    random_order(monkeypatch)
    found = verdicts(monkeypatch)
    for seed in range(20):
        notes = cases.run(Centred, seeds=(seed,))[1]
        assert [note for note in notes if note.startswith("converted: 2 SAGEConv")], notes
    assert sum(verdict.own is not None for verdict in found) > 10, "without a reference this would be no test"


def test_rounding_errors_that_repeat_from_call_to_call_are_no_obstacle(monkeypatch):
    """Their noise is zero, which says nothing of how large they are."""
    found = verdicts(monkeypatch)
    for seed in range(10):
        notes = cases.run(Centred, seeds=(seed,))[1]
        assert [note for note in notes if note.startswith("converted: 2 SAGEConv")], notes
    assert max(verdict.apart for verdict in found) > 1e-4


def wrongly(change):
    """A forward of a converted GCNConv whose output goes through ``change(out, adj)``."""
    plain = swapped_layers.WeftGCNConv.forward

    def forward(self, x, edge_index, edge_weight=None):
        adj = self.covered(x, edge_index, edge_weight)
        return change(plain(self, x, edge_index, edge_weight), adj)

    return forward


def one_row(out, adj):
    return out * (1.0 + 1e-3 * (torch.arange(out.shape[0]) == 7))[:, None]


WRONG = {
    "1e-4": lambda out, adj: out * (1 + 1e-4),
    "1e-3": lambda out, adj: out * (1 + 1e-3),
    "normalisation": lambda out, adj: out * ((adj.degrees() + 1) / (adj.degrees() + 2)).sqrt()[:, None],
    "gradient alone": lambda out, adj: out * (1 + 1e-4) - out.detach() * 1e-4,
    "one row": one_row,
}


class Two(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.first, self.second = pyg.GCNConv(i, 8), pyg.GCNConv(8, o)

    def forward(self, x, edge_index):
        return self.second(torch.relu(self.first(x, edge_index)), edge_index)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("sampled", [{}, {"mode": "sampled", "batch": 8, "fanout": (3, 3)}], ids=["full", "sampled"])
def test_wrong_layers_are_refused(monkeypatch, name, sampled):
    monkeypatch.setattr(swapped_layers.WeftGCNConv, "forward", wrongly(WRONG[name]))
    (note,) = [note for note in cases.run(Two, **sampled)[1] if "convert" in note]
    assert note.startswith("not converted: 2 GCNConv of PyG give other numbers"), note
    assert "from float64" in note


def test_wrong_layers_are_refused_in_a_module_that_rounds(monkeypatch):
    """Where PyG's own errors are some 1e-5, one of 1e-3 is still seen."""
    random_order(monkeypatch)
    plain = swapped_layers.WeftSAGEConv.forward
    monkeypatch.setattr(swapped_layers.WeftSAGEConv, "forward", lambda *given: plain(*given) * (1 + 1e-3))
    (note,) = [note for note in cases.run(Centred)[1] if "convert" in note]
    assert note.startswith("not converted: 2 SAGEConv of PyG give other numbers"), note


class Normed(nn.Module):
    """The gradient of the first bias is zero but for rounding, which is all of it in float32."""

    def __init__(self, i, o):
        super().__init__()
        self.first, self.norm, self.second = pyg.GCNConv(i, 8), nn.BatchNorm1d(8), pyg.GCNConv(8, o)

    def forward(self, x, edge_index):
        return self.second(F.dropout(torch.relu(self.norm(self.first(x, edge_index))), 0.5, self.training), edge_index)


def test_a_gradient_that_cancels_is_no_obstacle(monkeypatch):
    monkeypatch.setattr("weft.runtime.modules.convert.FLOOR", 1e-9)  # so that the reference is needed
    found = verdicts(monkeypatch)
    for seed in range(5):
        cases.run(Normed, seeds=(seed,))
    assert all(verdict.mine < 2e-5 and verdict.own < 2e-5 for verdict in found)


@pytest.mark.parametrize("edges", ["edge_index", "edge_weight", "adj_t", "data"])
def test_the_reference_is_the_module_in_float64(monkeypatch, edges):
    """However it takes its edges: PyG's float32 is near it, dropout and all."""

    class Takes(Normed):
        def forward(self, x, edge_index, edge_weight):
            x = F.dropout(torch.relu(self.norm(self.first(x, edge_index, edge_weight))), 0.5, self.training)
            return self.second(x, edge_index)

    class TakesSparse(Normed):
        def forward(self, x, adj_t):
            return super().forward(x, adj_t)

    class TakesData(Normed):
        def forward(self, data):
            return super().forward(data.x, data.edge_index)

    model = {"edge_index": Normed, "edge_weight": Takes, "adj_t": TakesSparse, "data": TakesData}[edges]
    monkeypatch.setattr("weft.runtime.modules.convert.FLOOR", 1e-12)
    found = verdicts(monkeypatch)
    cases.run(model, graph=cases.small(weight=edges == "edge_weight"))
    assert found
    assert all(verdict.own is not None and verdict.own < 1e-5 for verdict in found)


class HalfBuffer(Two):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("scale", torch.ones(o, dtype=torch.float16))

    def forward(self, x, edge_index):
        return super().forward(x, edge_index) * self.scale


class WritesFloat(Two):
    """It would raise in float64."""

    def forward(self, x, edge_index):
        return super().forward(x.float(), edge_index)


class EndsInFloat(Two):
    def forward(self, x, edge_index):
        return super().forward(x, edge_index).float()


@pytest.mark.parametrize("model", [HalfBuffer, WritesFloat, EndsInFloat])
def test_modules_that_are_not_to_be_had_in_float64_are_judged_without(monkeypatch, model):
    found = verdicts(monkeypatch)
    monkeypatch.setattr("weft.runtime.modules.convert.FLOOR", 1e-12)
    assert [note for note in cases.run(model)[1] if note.startswith("converted: 2 GCNConv")]
    assert [verdict.own for verdict in found] == [None]


def test_float64_is_left_out_where_memory_has_no_room_for_it(monkeypatch):
    found = verdicts(monkeypatch)
    monkeypatch.setattr("weft.runtime.modules.convert.FLOOR", 1e-12)
    monkeypatch.setattr(conversion, "has_room", lambda device: False)
    cases.run(Two)
    assert [verdict.own for verdict in found] == [None]


def test_other_precisions_are_compared_without_a_reference(monkeypatch):
    found = verdicts(monkeypatch)
    monkeypatch.setattr("weft.runtime.modules.convert.FLOOR", 1e-12)
    cases.run(Two, precision="bf16")
    assert [verdict.own for verdict in found] == [None]


def test_a_run_is_the_same_whether_it_was_tried_in_float64(monkeypatch):
    """Trials leave weights, buffers and generators as they were."""
    plain, _ = cases.run(Normed, convert=True)
    monkeypatch.setattr("weft.runtime.modules.convert.FLOOR", 1e-12)
    again, _ = cases.run(Normed, convert=True)
    assert plain[0].history["loss"] == again[0].history["loss"]


class BehindZero(torch.nn.Module):
    """Neighbours tie for the maximum, where PyG shares the gradient out in another way; a zero hides that at first."""

    def __init__(self, i, o):
        super().__init__()
        self.enter, self.conv = torch.nn.Linear(i, 8), pyg.SAGEConv(8, 8, aggr="max")
        self.last, self.gate = torch.nn.Linear(8, o), torch.nn.Parameter(torch.zeros(()))

    def forward(self, x, edge_index):
        h = self.enter(x)
        tied = h + (torch.sign(h) - h).detach()
        return self.last(h + self.gate * self.conv(tied, edge_index))


def test_a_weight_of_zero_hides_nothing():
    mine, notes = cases.run(BehindZero)
    plain, _ = cases.run(BehindZero, convert=False)
    assert not any(note.startswith("converted") for note in notes), notes
    assert mine[0].history["loss"] == plain[0].history["loss"]


def test_a_layer_that_caches_its_edges_is_left_to_pyg():
    class Cached(torch.nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.conv = pyg.GCNConv(i, o, cached=True)

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)

    _, notes = cases.run(Cached)
    assert any("cached=True keeps the edges of its first call" in note for note in notes), notes
