"""Programs made by hand: the training step of a two-layer GCN, as a capture would give it."""

from __future__ import annotations

from weft.core.graph_stats import GraphStats
from weft.core.program import Operator, Program, Value

ARXIV = GraphStats(
    "shape:ogbn-arxiv", num_nodes=169_343, num_edges=2_332_486, num_features=128, num_classes=40, symmetric=True,
    max_degree=13_100, degree_histogram=(0, 20_000, 60_000, 45_000, 28_000, 12_000, 3_500, 700, 100, 30, 8, 3, 1, 0, 1),
    num_train=90_941, num_val=29_799, num_test=48_603,
)  # fmt: skip


def gcn_step(nodes: int = 169_343, edges: int = 2_332_486, hidden: int = 64, classes: int = 40) -> Program:
    """``logits = A relu(A (X W0)) W1`` with its backward pass and update, in a dozen operators."""
    item = 4
    values = (
        Value(8 * edges, "graph", (edges,), "int32"),
        Value(nodes * 128 * item, "input", (nodes, 128)),
        Value(128 * hidden * item, "weight", (128, hidden)),
        Value(hidden * classes * item, "weight", (hidden, classes)),
        Value(nodes * hidden * item, "activation", (nodes, hidden)),
        Value(nodes * hidden * item, "activation", (nodes, hidden)),
        Value(nodes * classes * item, "activation", (nodes, classes)),
        Value(nodes * classes * item, "gradient", (nodes, classes)),
        Value(nodes * hidden * item, "gradient", (nodes, hidden)),
    )
    row = hidden * item
    wide, narrow = nodes * row, nodes * classes * item
    operators = (
        Operator("weft.linear", "forward", (1, 2), (4,), 2.0 * nodes * 128 * hidden, nodes * 128 * item + wide, 0, 1),
        Operator("weft.spmm", "forward", (0, 4), (5,), 2.0 * edges * hidden, wide + 4 * edges, edges * row, 2),
        Operator("aten.relu", "forward", (5,), (5,), 0.0, 2.0 * wide, 0, 1),
        Operator("aten.mm", "forward", (5, 3), (6,), 2.0 * nodes * hidden * classes, wide + narrow, 0, 1),
        Operator("weft.cross_entropy", "forward", (6,), (7,), 0.0, 2.0 * narrow, 0, 2),
        Operator("aten.mm", "backward", (7, 3), (8,), 2.0 * nodes * hidden * classes, wide + narrow, 0, 1),
        Operator("weft.spmm", "backward", (0, 8), (4,), 2.0 * edges * hidden, wide + 4 * edges, edges * row, 2),
        Operator("weft.weight_grad", "backward", (1, 4), (2,), 2.0 * nodes * 128 * hidden, 2.0 * wide, 0, 2),
        Operator("weft.adam_", "update", (2, 3), (2, 3), 0.0, 1e5, 0, 1),
    )
    return Program(values, operators, resident=(0, 1, 2, 3))
