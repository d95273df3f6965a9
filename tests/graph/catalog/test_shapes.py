"""Named shapes: the published sizes, and small likenesses of all of them."""

from __future__ import annotations

import inspect

import pytest
import torch

from weft.core.errors import GraphError
from weft.graph.catalog import shapes
from weft.graph.catalog.shapes import SHAPES

PUBLISHED = {  # nodes, stored entries, features, classes
    "cora": (2_708, 10_858, 1_433, 7),
    "citeseer": (3_327, 9_464, 3_703, 6),
    "pubmed": (19_717, 88_676, 500, 3),
    "proteins": (43_471, 162_088, 29, 2),
    "artist": (50_515, 1_638_396, 100, 12),
    "soc-blog": (88_784, 2_093_195, 128, 39),
    "dd": (334_925, 1_686_092, 98, 2),
    "amazon0601": (410_236, 4_878_875, 96, 22),
    "twitter": (580_768, 1_435_116, 1_323, 2),
    "yeast": (1_714_644, 3_636_546, 74, 2),
    "ovcar-8h": (1_890_931, 3_946_402, 66, 2),
    "reddit": (232_965, 114_615_892, 602, 41),
    "enwiki": (4_203_323, 202_623_226, 96, 128),
    "ogbn-proteins": (132_534, 2 * 39_561_252, 128, 112),
    "orkut": (3_072_441, 2 * 117_185_083, 128, 32),
    "ogbn-arxiv": (169_343, 2 * 1_166_243, 128, 40),
    "ogbn-arxiv-directed": (169_343, 1_166_243, 128, 40),
    "ogbn-products": (2_449_029, 2 * 61_859_140, 100, 47),
    "ogbn-papers100M": (111_059_956, 1_615_685_872, 128, 172),
    "bgs": (94_806, 672_884, 64, 2),
    "am": (881_680, 5_668_682, 64, 11),
}
SMALL = 600  # nodes


def small_scale(shape: shapes.Shape) -> float:
    return max(SMALL, 5 * shape.num_edges / shape.num_nodes, 5 * shape.num_classes) / shape.num_nodes


def test_the_table_has_the_published_sizes():
    assert set(SHAPES) == set(PUBLISHED)
    for name, (nodes, entries, features, classes) in PUBLISHED.items():
        shape = SHAPES[name]
        assert (shape.num_nodes, shape.num_features, shape.num_classes) == (nodes, features, classes)
        assert shape.num_edges == (entries if shape.directed else entries // 2 * 2)
        assert 1e-6 > 1 - shape.num_edges / entries >= 0
        assert shape.num_edges / nodes < shape.max_degree < nodes
        if not isinstance(shape.split, str) and isinstance(shape.split[0], int) and name != "ogbn-papers100M":
            assert sum(shape.split) == nodes


def test_every_source_is_cited():
    cited = inspect.getdoc(shapes)
    for source in {shape.source.split()[0] for shape in SHAPES.values()} - {"OGB"}:
        assert source in cited
    assert "Open Graph Benchmark" in cited


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in ("reddit", "ogbn-proteins")])
def test_a_small_likeness_keeps_the_average_degree(name):
    shape = SHAPES[name]
    graph = shapes.make(name, scale=small_scale(shape)).verify()
    assert graph.num_edges / graph.num_nodes == pytest.approx(shape.num_edges / shape.num_nodes, rel=0.01)
    assert (graph.num_features, graph.num_classes) == (shape.num_features, shape.num_classes)
    assert graph.num_relations == shape.relations
    assert graph.adj.symmetric is not shape.directed
    assert graph.multilabel is shape.multilabel
    assert int(graph.adj.degrees().max()) >= 1.5 * shape.num_edges / shape.num_nodes
    assert graph.train.numel() > 0
    assert graph.x.dtype == getattr(torch, shape.dtype)


def test_full_size_has_exactly_the_published_entries_and_split():
    cora = shapes.make("cora", seed=3)
    assert (cora.num_nodes, cora.num_edges, cora.name) == (2_708, 10_858, "cora")
    assert [part.numel() for part in (cora.train, cora.val, cora.test)] == [140, 500, 1_000]
    assert 140 <= cora.stats().max_degree <= 200


def test_a_seed_and_a_dtype_can_be_chosen():
    first, again = (shapes.make("citeseer", seed=5, scale=0.2) for _ in range(2))
    assert torch.equal(first.adj.indices, again.adj.indices)
    assert not torch.equal(first.adj.indices, shapes.make("citeseer", seed=6, scale=0.2).adj.indices)
    assert shapes.make("bgs", scale=0.01, dtype=torch.bfloat16).x.dtype == torch.bfloat16


def test_names_are_forgiven_their_case_and_misspellings_corrected():
    assert shapes.find("OGBN-Papers100m").name == "ogbn-papers100M"
    with pytest.raises(GraphError, match=r"no shape 'redit' \(did you mean 'reddit'"):
        shapes.find("redit")


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-4, float("inf"), float("nan")])
def test_an_impossible_scale_is_named(scale):
    with pytest.raises(GraphError, match="scale="):
        shapes.make("reddit", scale=scale)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_arxiv_shape_is_the_same_on_a_gpu():
    here, there = (shapes.make("ogbn-arxiv", seed=1, device=device) for device in ("cpu", "cuda"))
    assert here.num_edges == 2_332_486
    assert torch.equal(here.adj.indptr, there.adj.indptr.cpu())
    assert torch.equal(here.adj.indices, there.adj.indices.cpu())
    assert torch.equal(here.x, there.x.cpu())
    assert torch.equal(here.test, there.test.cpu())
