"""Decisions about a step for two dozen groups, as a table: a change of a formula must not change one unnoticed."""

from __future__ import annotations

import pytest

from weft.core.graph_stats import GraphStats
from weft.core.task import Task
from weft.planner.grouping.limits import GroupLimits, fitting_size
from weft.planner.grouping.step_options import first_layer, row_order, threads

SHAPES = {
    "demo": GraphStats("demo", 300, 1_200, num_features=32, num_classes=4),
    "cora": GraphStats("cora", 2_708, 10_556, num_features=1_433, num_classes=7, feature_nnz=49_216),
    "pubmed": GraphStats("pubmed", 19_717, 88_648, num_features=500, num_classes=3),
    "arxiv": GraphStats("arxiv", 169_343, 2_315_598, num_features=128, num_classes=40),
    "products": GraphStats("products", 2_449_029, 123_718_280, num_features=100, num_classes=47),
    "reddit": GraphStats("reddit", 232_965, 114_615_892, num_features=602, num_classes=41),
    "papers": GraphStats("papers", 111_059_956, 1_615_685_872, num_features=128, num_classes=172),
}

# shape, members, settings; threads on a CPU, rows by cluster, first layer once, tasks that fill a CPU, a GPU
DECISIONS = [
    ("demo", 1, {}, 1, False, True, 256, 256),
    ("demo", 64, {"hidden": 16}, 1, False, True, 256, 256),
    ("demo", 256, {"hidden": 256}, None, False, True, 109, 256),
    ("cora", 1, {}, 1, False, False, 48, 256),
    ("cora", 8, {"hidden": 16}, 1, False, False, 193, 256),
    ("cora", 1, {"model": "gat", "hidden": 8}, 1, False, False, 256, 256),
    ("cora", 4, {"hidden": 512, "layers": 3}, None, False, False, 4, 64),
    ("pubmed", 1, {"hidden": 16}, None, False, True, 8, 128),
    ("pubmed", 1, {}, None, False, True, 4, 64),
    ("pubmed", 16, {"epochs": 2000}, None, False, True, 4, 64),
    ("arxiv", 1, {"epochs": 2000}, None, False, True, 1, 32),
    ("arxiv", 1, {"epochs": 2000, "hidden": 128}, None, True, True, 1, 16),
    ("arxiv", 1, {"epochs": 2000, "hidden": 128, "precision": "bf16"}, None, False, True, 1, 16),
    ("arxiv", 4, {"epochs": 2000}, None, True, True, 1, 32),
    ("arxiv", 4, {"epochs": 100}, None, False, True, 1, 32),
    ("arxiv", 3, {"epochs": 2000, "model": "sage"}, None, False, True, 1, 32),
    ("arxiv", 16, {"model": "gin", "hidden": 32}, None, False, True, 1, 64),
    ("products", 1, {}, None, True, True, 1, 32),
    ("products", 1, {"epochs": 10}, None, False, True, 1, 32),
    ("products", 16, {"epochs": 10}, None, True, True, 1, 32),
    ("products", 1, {"model": "gatv2", "hidden": 8, "heads": 8}, None, False, False, 1, 256),
    ("reddit", 1, {"hidden": 16}, None, False, True, 1, 128),
    ("reddit", 2, {"hidden": 256, "layers": 4, "epochs": 30}, None, True, True, 1, 8),
    ("papers", 1, {}, None, False, True, 1, 32),
]


@pytest.mark.parametrize(("shape", "count", "settings", "cores", "clustered", "once", "on_cpu", "on_gpu"), DECISIONS)
def test_a_decision_is_as_it_was(shape, count, settings, cores, clustered, once, on_cpu, on_gpu):
    stats = SHAPES[shape]
    tasks = [Task(graph="g", seed=seed, name=str(seed), **settings) for seed in range(count)]
    assert threads(tasks, stats, "cpu")[0] == cores
    assert row_order(tasks, stats, "cuda")[0] is clustered
    assert first_layer(tasks, stats)[0] is once
    sizes = [fitting_size(tasks[0], GroupLimits(stats, device)).tasks for device in ("cpu", "cuda")]
    assert sizes == [on_cpu, on_gpu]
