"""Modules over PyG's layers over ranks: the numbers of one rank, or a reason before the first epoch."""

from __future__ import annotations

import pytest

import weft
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import SpecError

pytest.importorskip("torch_geometric")

from tests.dist import pyg_modules


def task(model: type, **changes) -> weft.Task:
    return weft.Task(**{"graph": tiny_graph(weighted=True), "model": model, "epochs": 5, "lr": 0.02, **changes})


@pytest.mark.parametrize("ranks", [2, 3])
def test_converted_layers_have_the_numbers_of_one_rank(ranks):
    one = task(pyg_modules.Convolutions)
    found, expected = (weft.run(one, ranks=count, device="cpu") for count in (ranks, 1))
    for name, values in expected.history.items():
        assert found.history[name] == pytest.approx(values, rel=2e-4, abs=2e-5, nan_ok=True), name


def test_a_sweep_of_converted_modules_over_ranks():
    sweep = weft.Sweep(tiny_graph(), model=pyg_modules.Convolutions, epochs=3, lr=[0.02, 0.01])
    found, expected = (weft.run(sweep, ranks=ranks, device="cpu") for ranks in (2, 1))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.history["loss"] == pytest.approx(theirs.history["loss"], rel=2e-4)


@pytest.mark.parametrize("fanout", [[3, 2], [4, 3, 2, -1]], ids=["fewer hops than layers", "as many"])
def test_converted_layers_on_sampled_batches_have_the_numbers_of_one_rank(fanout):
    one = task(pyg_modules.WithoutDropout, mode="sampled", fanout=fanout, batch=8)
    found, expected = (weft.run(one, ranks=ranks, device="cpu") for ranks in (2, 1))
    for name, values in expected.history.items():
        assert found.history[name] == pytest.approx(values, rel=2e-4, abs=2e-5, nan_ok=True), name


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        (pyg_modules.NotConverted, {}, "TAGConv has no counterpart in Weft"),
        (pyg_modules.Convolutions, {"convert": False}, "convert=False"),
        (pyg_modules.Alone, {}, "it has no layers of PyG"),
        (pyg_modules.CountsEdges, {}, "depend on which nodes are on which rank"),
        (
            pyg_modules.CountsEdges,
            {"mode": "sampled", "fanout": [3, 3], "batch": 8},
            "depend on which nodes are on which rank",
        ),
    ],
    ids=["not converted", "kept", "alone", "counts edges", "counts edges, sampled"],
)
def test_what_would_miss_nodes_of_other_ranks_is_refused(model, changes, words):
    with pytest.raises(SpecError, match=words):
        weft.run(task(model, **changes), ranks=2, device="cpu")
