"""GraphStats: a summary of a graph with everything that planning needs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields

from weft.core.plain_data import PlainData

LATER = ("relation_edges", "relation_rows", "regression", "num_splits", "edge_features")  # in digests if not default


@dataclass(frozen=True)
class GraphFingerprint(PlainData):
    """The fingerprint of a plan's graph: its sizes, and a digest of all of its :class:`GraphStats`."""

    name: str
    num_nodes: int
    num_edges: int
    num_features: int
    num_classes: int
    digest: str

    @property
    def sizes(self) -> str:
        """The sizes in words."""
        return (
            f"{self.num_nodes:,} nodes, {self.num_edges:,} edges, {self.num_features:,} features and "
            f"{self.num_classes:,} classes"
        )

    def obstacle(self, now: GraphFingerprint) -> str | None:
        """Why the graph ``now`` is not this one, in a sentence; None if it is."""
        if now.digest == self.digest:
            return None
        if now.sizes != self.sizes:
            return f"graph {self.name!r} had {self.sizes} when this was planned, and has {now.sizes} now; plan again"
        return f"graph {self.name!r} has other degrees, features or splits than when this was planned; plan again"


@dataclass(frozen=True)
class GraphStats(PlainData):
    """What a plan needs to know of a graph, without the graph.

    Degrees are in-degrees. ``degree_histogram[b]`` counts the nodes whose degree d has
    ``d.bit_length() == b``: bin 0 holds the isolated nodes, bin 1 degree 1, bin 2 degrees 2-3, and so on.
    ``relation_edges[r]`` counts the edges of relation r, ``relation_rows`` the pairs of a node and a relation that it
    has an in-edge of: rows that a relational layer aggregates to. ``num_train``, ``num_val`` and ``num_test`` are of
    the first of ``num_splits`` splits. ``edge_features``: features per edge, 0 for one number without a dimension.
    """

    name: str
    num_nodes: int
    num_edges: int
    num_features: int = 0
    feature_nnz: int | None = None
    feature_dtype: str = "float32"
    num_classes: int = 0
    multilabel: bool = False
    regression: bool = False  # num_classes numbers to predict per node, and no classes
    symmetric: bool = False
    weighted: bool = False
    num_relations: int = 0
    relation_edges: tuple[int, ...] = ()
    relation_rows: int = 0
    max_degree: int = 0
    degree_histogram: tuple[int, ...] = ()
    num_train: int = 0
    num_val: int = 0
    num_test: int = 0
    num_splits: int = 1
    edge_features: int | None = None

    @property
    def sparse_features(self) -> bool:
        """Whether the features are kept as a sparse matrix."""
        return self.feature_nnz is not None

    def fingerprint(self) -> GraphFingerprint:
        """The fingerprint of this graph; its name does not count."""
        without = {row.name for row in fields(self) if row.name in LATER and getattr(self, row.name) == row.default}
        facts = {key: value for key, value in self.to_dict().items() if key not in {"name", *without}}
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        return GraphFingerprint(self.name, self.num_nodes, self.num_edges, self.num_features, self.num_classes, digest)
