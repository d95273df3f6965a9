"""Write the embedded graph, demo.npz: ``python -m tests.graph.catalog.demo_graph [FILE]``.

A generated citation-like graph of the size of Cora: sparse bag-of-words features, 7 classes, Planetoid's split.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from weft.graph.catalog.names import DEMO
from weft.graph.generate import citation
from weft.graph.graph import Graph


def demo_graph() -> Graph:
    """The graph that demo.npz holds."""
    return citation(
        2_400, 9_600, 800, 7, seed=7, exponent=2.8, max_degree=120, homophily=0.8,
        density=0.02, feature_signal=0.25, label_noise=0.08, split="planetoid", name="demo",
    )  # fmt: skip


def demo_arrays() -> dict[str, np.ndarray]:
    """Its arrays, by the keys of the npz reader, in the smallest types."""
    graph = demo_graph()
    src, dst = graph.edge_index().numpy().astype(np.int16)
    matrix = graph.x.matrix
    arrays = {"num_nodes": np.int64(graph.num_nodes), "src": src, "dst": dst}
    arrays |= {"x_indptr": matrix.indptr.numpy(), "x_indices": matrix.indices.numpy().astype(np.int16)}
    arrays |= {"x_data": matrix.weight.numpy(), "x_shape": np.array(graph.x.shape)}
    arrays |= {name: getattr(graph, name).numpy().astype(np.int16) for name in ("y", "train", "val", "test")}
    return arrays


if __name__ == "__main__":
    np.savez_compressed(Path(sys.argv[1]) if len(sys.argv) > 1 else DEMO, **demo_arrays())
