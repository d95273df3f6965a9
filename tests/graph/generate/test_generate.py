"""Generated graphs: exact counts, distinct edges, planted classes, and the same graph for the same seed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.errors import GraphError
from weft.graph import Graph, SparseFeatures
from weft.graph.generate import citation

MAKERS = {
    "citation": lambda seed, **more: citation(400, 3001, 12, 5, seed=seed, **more),
    "citation directed": lambda seed, **more: citation(400, 3001, 12, 5, directed=True, seed=seed, **more),
    "citation relations": lambda seed, **more: citation(300, 2000, 4, 3, relations=7, seed=seed, **more),
    "citation words": lambda seed, **more: citation(300, 1500, 90, 4, density=0.05, seed=seed, **more),
    "citation multilabel": lambda seed, **more: citation(300, 1500, 4, 20, multilabel=True, seed=seed, **more),
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def dense(x):
    return x.to_dense() if isinstance(x, SparseFeatures) else x


def arrays(graph: Graph) -> dict[str, torch.Tensor]:
    named = {name: getattr(graph, name) for name in ("y", "train", "val", "test", "relation")}
    named |= {"indptr": graph.adj.indptr, "indices": graph.adj.indices, "x": dense(graph.x)}
    return {name: value for name, value in named.items() if value is not None}


def homophily(graph: Graph) -> float:
    src, dst = graph.edge_index()
    return (graph.y[src] == graph.y[dst]).float().mean().item()


def test_a_made_graph_passes_every_check_and_has_no_loops_or_repeats(make):
    graph = make(3).verify()
    src, dst = graph.edge_index()
    assert not (src == dst).any()
    assert torch.unique(dst * graph.num_nodes + src).numel() == graph.num_edges
    sizes = [part.numel() for part in (graph.train, graph.val, graph.test)]
    assert sum(sizes) == graph.num_nodes
    assert sizes[0] > sizes[1] > 0


def test_a_seed_is_a_graph(make):
    first, again, other = arrays(make(1)), arrays(make(1)), arrays(make(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["indices"], other["indices"])
    assert not torch.equal(first["x"], other["x"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_seed_is_the_same_graph_on_a_gpu(make):
    here, there = arrays(make(1)), arrays(make(1, device="cuda"))
    assert all(torch.equal(here[name], there[name].cpu()) for name in here)


@pytest.mark.parametrize("edges", [0, 1, 2, 50, 399, 400, 2_000, 40_000])
@pytest.mark.parametrize("directed", [False, True])
def test_stored_entries_are_exact(edges, directed):
    graph = citation(400, edges, 4, 3, directed=directed)
    assert graph.num_edges == (edges if directed else edges // 2 * 2)
    assert graph.adj.symmetric is not directed
    graph.verify()


@settings(deadline=None, max_examples=25)
@given(
    nodes=st.integers(2, 60),
    fill=st.floats(0, 0.5),
    classes=st.integers(1, 6),
    directed=st.booleans(),
    seed=st.integers(0, 2**40),
)
def test_every_density_up_to_one_half_is_reached(nodes, fill, classes, directed, seed):
    edges = int(fill * nodes * (nodes - 1))
    graph = citation(nodes, edges, 3, min(classes, nodes), directed=directed, seed=seed)
    assert graph.num_edges == (edges if directed else edges // 2 * 2)
    graph.verify()


def test_no_node_is_isolated_where_edges_suffice():
    assert int(citation(1_000, 2_000, 4, 5).adj.degrees().min()) >= 1
    assert int(citation(1_000, 1_000, 4, 5, directed=True).adj.degrees().min()) == 1


def test_degrees_are_skewed_up_to_the_hub_asked_for():
    directed = citation(3_000, 30_000, 4, 4, max_degree=700, directed=True).adj.degrees()
    assert int(directed.max()) == 700
    undirected = citation(3_000, 30_000, 4, 4, max_degree=700).adj.degrees()
    assert 600 <= int(undirected.max()) <= 800
    for degrees in (directed, undirected):
        assert degrees.float().median() < 0.75 * degrees.float().mean()


@pytest.mark.parametrize("wanted", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("directed", [False, True])
def test_homophily_is_what_was_asked_for(wanted, directed):
    graph = citation(4_000, 40_000, 4, 5, homophily=wanted, max_degree=80, directed=directed)
    assert homophily(graph) == pytest.approx(wanted, abs=0.02)


def test_classes_are_all_there_and_skewed():
    counts = torch.bincount(citation(2_000, 4_000, 4, 10, label_noise=0.0).y)
    assert counts.numel() == 10
    assert counts[0] > 2 * counts[9] > 0
    level = torch.bincount(citation(2_000, 4_000, 4, 10, label_noise=0.0, class_skew=0.0).y)
    assert int(level.max() - level.min()) <= 1


def test_relations_are_skewed_and_equal_both_ways():
    graph = citation(500, 8_000, 4, 3, relations=12)
    counts = torch.bincount(graph.relation.long(), minlength=12)
    assert graph.num_relations == 12
    assert counts[0] > 4 * counts[11] > 0
    src, dst = graph.edge_index()
    there, back = ((a * 500 + b).argsort() for a, b in ((src, dst), (dst, src)))
    assert torch.equal(graph.relation[there], graph.relation[back])


def test_multilabel_tasks_differ_by_planted_class():
    graph = citation(2_000, 8_000, 4, 30, multilabel=True, class_skew=0.0)
    assert graph.multilabel
    assert graph.y.shape == (2_000, 30)
    src, dst = graph.edge_index()
    strangers = graph.y[dst][torch.randperm(dst.numel(), generator=torch.Generator().manual_seed(0))]
    agree = (graph.y[src] == graph.y[dst]).float().mean()
    assert agree > (graph.y[src] == strangers).float().mean() + 0.03


def test_words_are_distinct_and_of_the_asked_density():
    graph = citation(500, 2_000, 300, 4, density=0.04)
    graph.x.from_csr(graph.x.matrix.indptr, graph.x.matrix.indices, graph.x.values, graph.x.shape)
    assert graph.x.nnz / (500 * 300) == pytest.approx(0.04, rel=0.1)
    assert set(graph.x.values.tolist()) == {1.0}


def test_features_take_the_dtype_asked_for_and_have_unit_noise():
    x = citation(2_000, 4_000, 50, 3, dtype=torch.float16, feature_signal=0.0).x
    assert x.dtype == torch.float16
    assert x.float().mean().abs() < 0.01
    assert x.float().std() == pytest.approx(1.0, abs=0.01)


def test_planetoid_split_has_twenty_per_class():
    graph = citation(2_500, 8_000, 4, 5, split="planetoid")
    assert torch.bincount(graph.y[graph.train]).tolist() == [20] * 5
    assert (graph.val.numel(), graph.test.numel()) == (500, 1_000)
    counted = citation(100, 300, 4, 3, split=(50, 20, 10))
    assert [part.numel() for part in (counted.train, counted.val, counted.test)] == [50, 20, 10]


# ---- does accuracy mean something? --------------------------------------------------------------------


def nearest_centre_accuracy(graph: Graph, x: torch.Tensor) -> float:
    """Accuracy on the test nodes of the class whose mean over the training nodes is nearest."""
    labels = graph.y[graph.train]
    centres = torch.stack([x[graph.train][labels == c].mean(0) for c in range(graph.num_classes)])
    guess = torch.cdist(x[graph.test], centres).argmin(1)
    return (guess == graph.y[graph.test]).float().mean().item()


def averaged(graph: Graph, x: torch.Tensor) -> torch.Tensor:
    src, dst = graph.edge_index()
    total = x.clone().index_add_(0, dst, x[src])
    return total / (graph.adj.degrees()[:, None] + 1)


@pytest.mark.parametrize(
    ("features", "options"),
    [(64, {}), (400, {"density": 0.04}), (64, {"directed": True})],
    ids=["dense", "words", "directed"],
)
def test_neighbours_tell_more_than_features_alone(features, options):
    graph = citation(3_000, 30_000, features, 8, **options)
    x = dense(graph.x)
    alone, together = nearest_centre_accuracy(graph, x), nearest_centre_accuracy(graph, averaged(graph, x))
    assert 0.2 < alone < 0.75
    assert alone + 0.12 < together < 0.97


def test_without_signal_features_tell_nothing():
    graph = citation(3_000, 30_000, 64, 8, feature_signal=0.0, class_skew=0.0)
    assert nearest_centre_accuracy(graph, graph.x) < 0.2


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: citation(10, 60, 4, 2), "num_edges=60 would fill more than half"),
        (lambda: citation(1, 0, 4, 1), "num_nodes=1"),
        (lambda: citation(10, 20, 4, 11), "num_classes=11 must lie in 1..10"),
        (lambda: citation(10, -2, 4, 2), "num_edges=-2"),
        (lambda: citation(100, 600, 4, 2, max_degree=3), "max_degree=3 is below the mean degree 6.0"),
        (lambda: citation(100, 600, 4, 2, exponent=1.0), "exponent=1.0"),
        (lambda: citation(100, 600, 4, 2, homophily=1.5), "homophily=1.5"),
        (lambda: citation(100, 600, 4, 2, homophily=0.99, label_noise=0.2), "label_noise=0.2"),
        (lambda: citation(100, 600, 4, 2, label_noise=1.0), "label_noise=1.0"),
        (lambda: citation(100, 600, 4, 2, density=0.9), "density=0.9"),
        (lambda: citation(100, 600, 4, 2, relations=-1), "relations=-1"),
        (lambda: citation(100, 600, 4, 2, split="half"), "split='half'"),
        (lambda: citation(100, 600, 4, 2, split=(80, 30, 10)), "needs 120 of 100"),
    ],
)
def test_a_wrong_argument_is_named(build, says):
    with pytest.raises(GraphError, match=says.replace(".", r"\.").replace("[", r"\[")):
        build()
