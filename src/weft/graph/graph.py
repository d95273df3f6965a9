"""Graph: edges, features, labels, splits and relations, checked once and then trusted.

Shapes: N nodes, E edges, F features, C classes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.core.graph_stats import GraphStats
from weft.graph import check as validate
from weft.graph import convert
from weft.graph.build import (
    adjacency_from_csr,
    adjacency_from_edges,
    check_relations,
    edge_values,
    is_symmetric,
    merged_words,
    relation_counts,
)
from weft.graph.check import dtype_name
from weft.graph.labels import (
    SPLIT_KINDS,
    SPLITS,
    Split,
    as_labels,
    as_split,
    check_num_classes,
    columns_of,
    count_classes,
    fold_splits,
    is_matrix_of_numbers,
    random_split,
)
from weft.graph.sparse_features import SparseFeatures, as_features, check_csr
from weft.ops.csr.adjacency import Adjacency


class Graph:
    """A graph to train on.

    ``adj`` is the plain :class:`Adjacency` (CSR by destination, no loops added), ``x [N, F]`` dense or
    :class:`SparseFeatures`, ``y [N]`` int64 class numbers (-1: unlabelled), ``[N, C]`` float 0/1, or ``[N]`` float32
    numbers to predict (NaN: none),
    ``train``, ``val``, ``test`` sorted int64 node ids (empty when there are none), ``relation [E]`` int32 in
    CSR order.

    The constructor only compares shapes; use :meth:`from_edges`, :meth:`from_csr` and the readers for
    data that has not been checked, or call :meth:`verify`.
    """

    def __init__(
        self,
        adj: Adjacency,
        x: Tensor | SparseFeatures | None = None,
        y: Tensor | None = None,
        train: Tensor | None = None,
        val: Tensor | None = None,
        test: Tensor | None = None,
        relation: Tensor | None = None,
        name: str = "graph",
        *,
        num_classes: int | None = None,
        num_relations: int | None = None,
        several: Sequence[Split] = (),
        numbers: bool | None = None,
    ) -> None:
        none = torch.empty(0, dtype=torch.int64, device=adj.device)
        self.adj, self.x, self.y, self.relation, self.name = adj, x, y, relation, name
        self.train = none if train is None else train
        self.val = none if val is None else val
        self.test = none if test is None else test
        self._num_classes, self._num_relations, self._several = num_classes, num_relations, tuple(several)
        if numbers is None:  # whether y is to be predicted
            matrix = y is not None and y.dim() == 2
            numbers = (
                y is not None and y.is_floating_point() and (not matrix or (not y.is_meta and is_matrix_of_numbers(y)))
            )
        self._numbers = numbers
        self._stats: GraphStats | None = None
        self.notes: tuple[str, ...] = ()  # what was left out or changed on reading
        self.ids: Any = None  # [N] the user's own ids as text, of tables; None: nodes are numbers
        self.kept: dict[Any, Any] | None = None  # first aggregations, of a graph that is kept between runs
        self._check_shapes()
        if relation is not None and adj.relation is not relation:
            self.adj = adj.related(relation, self.num_relations)

    def _check_shapes(self) -> None:
        adj, relation = self.adj, self.relation
        validate.check_num_nodes(adj.num_rows)
        if adj.num_cols != adj.num_rows or adj.row_scale is not None or adj.col_scale is not None:
            raise GraphError(f"{adj} is not a plain square adjacency; a graph keeps its edges unscaled")
        for part, values in (("x", self.x), ("y", self.y)):
            if values is not None:
                validate.check_rows(values.shape[0], adj.num_rows, part, "node")
        if relation is not None:
            validate.check_rows(relation.numel(), adj.num_edges, "relation", "edge")

    # ---- making one ----------------------------------------------------------------------------------

    @classmethod
    def from_edges(
        cls,
        src: Any,
        dst: Any = None,
        num_nodes: int | None = None,
        x: Any = None,
        y: Any = None,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        edge_weight: Any = None,
        relation: Any = None,
        directed: bool = True,
        name: str = "graph",
        num_classes: int | None = None,
        num_relations: int | None = None,
        edge_attr: Any = None,
    ) -> Graph:
        """A graph from edges ``src[e] -> dst[e]`` in any order: lists, numpy arrays or torch tensors.

        ``num_nodes`` defaults to the rows of ``x`` or ``y``, else to the largest id plus one. ``x`` may be
        dense, scipy sparse or torch sparse. Splits are boolean masks or node ids. ``y = -1`` marks a node
        without a label, which no split may hold. Everything is moved to the device of ``src``; float64
        becomes float32; arrays of the right type are shared, not copied.

        ``directed=True`` keeps every edge as given, parallel ones too (they count twice in a sum).
        ``directed=False`` adds missing reverse edges and merges duplicates: all given edges between two
        nodes (and of one relation) become one edge each way, weighted by the mean of theirs.

        ``relation`` numbers the kind of every edge, 0, 1, 2, ...; ``num_relations`` says how many kinds there are, if
        the last of them have no edge. ``edge_attr [E, D]`` are features of the edges, for modules whose ``forward``
        has a parameter of that name; merged edges have the mean of theirs.
        """
        if dst is None:
            raise GraphError(
                "Graph.from_edges takes two columns of node ids: from_edges(edge_index[0], edge_index[1]), or "
                "from_edges(table['source'], table['target'])"
            )
        x, y = as_features(x), as_labels(y)
        if num_nodes is None and (x is not None or y is not None):
            name_of, rows = ("y", y) if x is None else ("x", x)
            num_nodes = rows.shape[0]
            validate.check_rows_for_ids(name_of, num_nodes, src=src, dst=dst)
        adj, relation = adjacency_from_edges(src, dst, num_nodes, edge_weight, relation, directed, edge_attr)
        fields = {"relation": relation, "num_relations": num_relations, "name": name}
        graph = cls._checked(adj, x, y, num_classes, **fields).with_splits(train, val, test)
        merged = "" if directed or relation is not None else merged_words(src, dst, adj)
        return graph.noted(merged) if merged else graph

    @classmethod
    def from_csr(
        cls,
        indptr: Any,
        indices: Any,
        x: Any = None,
        y: Any = None,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        edge_weight: Any = None,
        relation: Any = None,
        symmetric: bool | None = None,
        name: str = "graph",
        num_classes: int | None = None,
        num_relations: int | None = None,
        edge_attr: Any = None,
    ) -> Graph:
        """A graph from CSR by destination: ``indices[indptr[i]:indptr[i+1]]`` are the sources of node i.

        Ids must ascend within a row; ``edge_weight``, ``relation`` and ``edge_attr`` are in the same order. The
        arrays are scanned, never sorted or copied when they are int32. ``symmetric=None`` finds out whether the matrix
        equals its transpose (weights included), which takes a sort; say it if you know.
        """
        adj, relation = adjacency_from_csr(indptr, indices, edge_weight, relation, symmetric, edge_attr)
        fields = {"relation": relation, "num_relations": num_relations, "name": name}
        graph = cls._checked(adj, as_features(x), as_labels(y), num_classes, **fields)
        return graph.with_splits(train, val, test)

    @classmethod
    def _checked(cls, adj: Adjacency, x: Any, y: Any, num_classes: Any, **fields: Any) -> Graph:
        """A graph of checked edges, features and labels, whose numbers of classes and relations are checked here."""
        x, y = (value if value is None else value.to(adj.device) for value in (x, y))
        check_num_classes(y, num_classes)
        fields["num_relations"] = check_relations(fields["relation"], fields["num_relations"])
        return cls(adj, x, y, num_classes=num_classes, **fields)

    @classmethod
    def from_scipy(cls, matrix: Any, weighted: bool | None = None, **fields: Any) -> Graph:
        """From a square scipy sparse matrix whose entry (i, j) is the edge i -> j.

        ``weighted=None`` keeps the values as weights unless all are 1. Other arguments as :meth:`from_edges`.
        """
        return cls.from_edges(**(convert.scipy_fields(matrix, weighted) | fields))

    @classmethod
    def from_pyg(
        cls, data: Any, split: int | None = None, name: str = "graph", num_relations: int | None = None
    ) -> Graph:
        """From a PyG ``Data``: x, y, edge_index (or adj_t), edge_weight, edge_attr, edge_type and the masks.

        A dataset of one ``Data`` is that; ``HeteroData`` with nodes of one type has a relation per type of edges. A
        one-column ``edge_attr`` is also a weight if there is no ``edge_weight``.
        Masks with several columns are several splits; ``split`` takes one column alone. ``num_relations`` as for
        :meth:`from_edges`.
        """
        data = convert.pyg_data(data)
        graph = cls.from_edges(**convert.pyg_fields(data, split), name=name, num_relations=num_relations)
        keys = getattr(data, "keys", ())
        unread = sorted(set(keys() if callable(keys) else keys) - convert.PYG_READ)
        return graph.noted(f"not read of the PyG data: {', '.join(unread)}") if unread else graph

    @classmethod
    def from_dgl(
        cls, graph: Any, x: str = "feat", y: str = "label", weight: str = "weight", name: str = "graph"
    ) -> Graph:
        """From a homogeneous DGL graph; ``x``, ``y`` and ``weight`` name its data.

        Masks are ``train_mask``, ``val_mask``, ``test_mask``; relations are what ``dgl.to_homogeneous`` left.
        """
        return cls.from_edges(**convert.dgl_fields(graph, x, y, weight), name=name)

    @classmethod
    def from_networkx(cls, graph: Any, x: str = "x", y: str = "y", weight: str = "weight", **fields: Any) -> Graph:
        """From a networkx graph; ``x``, ``y`` and ``weight`` name the attributes of nodes and edges.

        Nodes are numbered in the order of ``graph.nodes``. Other arguments as :meth:`from_edges`.
        """
        return cls.from_edges(**(convert.networkx_fields(graph, x, y, weight) | fields))

    # ---- what it is ----------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.adj.num_rows

    @property
    def num_edges(self) -> int:
        """E: stored directed edges, so an undirected edge counts twice."""
        return self.adj.num_edges

    @property
    def num_features(self) -> int:
        """F, 0 without features."""
        return 0 if self.x is None else self.x.shape[1]

    @property
    def num_classes(self) -> int:
        """C: classes, or labels a node may have, or numbers to predict per node; 0 without labels."""
        if self._num_classes is None:
            self._num_classes = count_classes(self.y)
        return self._num_classes

    @property
    def num_relations(self) -> int:
        """R, 0 without relations."""
        if self._num_relations is None:
            related = self.relation is not None and self.relation.numel() > 0
            self._num_relations = int(self.relation.max()) + 1 if related else 0
        return self._num_relations

    @property
    def multilabel(self) -> bool:
        """Whether a node may have several labels (``y`` is a matrix of zeros and ones)."""
        return self.y is not None and self.y.dim() == 2 and not self._numbers

    @cached_property
    def one_hot(self) -> bool:
        """Whether ``y`` is a matrix whose rows have a single 1 each, as one class per node has."""
        return self.multilabel and self.y is not None and bool((self.y.sum(1) == 1).all())

    @property
    def regression(self) -> bool:
        """Whether ``y`` has numbers to predict, one or ``num_classes`` per node (NaN: none), not classes."""
        return self.y is not None and self._numbers

    @property
    def edge_weight(self) -> Tensor | None:
        """Edge weights ``[E]`` in CSR order."""
        return self.adj.weight

    @property
    def edge_attr(self) -> Tensor | None:
        """Features of the edges ``[E]`` or ``[E, D]`` in CSR order."""
        return self.adj.edge_attr

    @property
    def device(self) -> torch.device:
        """Where the edges live."""
        return self.adj.device

    def __repr__(self) -> str:
        kinds = ["symmetric" if self.adj.symmetric else "directed"]
        if self.adj.weight is not None:
            kinds.append("weighted")
        if self.edge_attr is not None:
            kinds.append(f"{self.edge_attr.shape[1] if self.edge_attr.dim() > 1 else 1} edge features")
        if self.relation is not None:
            kinds.append(f"{self.num_relations} relations")
        parts = [f"{self.num_nodes:,} nodes", f"{self.num_edges:,} edges ({', '.join(kinds)})"]
        if self.x is not None:
            kind = dtype_name(self.x.dtype)
            if isinstance(self.x, SparseFeatures):
                share = self.x.nnz / max(self.num_nodes * self.num_features, 1)
                kind = f"sparse {kind}, {100 * share:.2g} % filled"
            parts.append(f"{self.num_features:,} features ({kind})")
        if self.regression and self.num_classes == 1:
            parts.append("a number to predict")
        elif self.y is not None:
            kind = "labels per node" if self.multilabel else "numbers to predict" if self.regression else "classes"
            parts.append(f"{self.num_classes:,} {kind}")
        if self.train.numel() or self.val.numel() or self.test.numel():
            parts.append(f"train/val/test {self.train.numel():,}/{self.val.numel():,}/{self.test.numel():,}")
        if self.num_splits > 1:
            parts.append(f"the first of {self.num_splits} splits")
        return f"Graph({self.name!r}: {', '.join(parts)}, on {self.device})"

    def stats(self) -> GraphStats:
        """The summary a plan needs, computed once."""
        if self._stats is None:
            degrees, attr = self.adj.degrees(), self.edge_attr
            relation_edges, relation_rows = relation_counts(self.adj)
            self._stats = GraphStats(
                name=self.name,
                num_nodes=self.num_nodes,
                num_edges=self.num_edges,
                num_features=self.num_features,
                feature_nnz=self.x.nnz if isinstance(self.x, SparseFeatures) else None,
                feature_dtype="float32" if self.x is None else dtype_name(self.x.dtype),
                num_classes=self.num_classes,
                multilabel=self.multilabel,
                regression=self.regression,
                symmetric=self.adj.symmetric,
                weighted=self.adj.weight is not None,
                num_relations=self.num_relations,
                relation_edges=relation_edges,
                relation_rows=relation_rows,
                max_degree=int(degrees.max()),
                degree_histogram=degree_histogram(degrees),
                num_train=self.train.numel(),
                num_val=self.val.numel(),
                num_test=self.test.numel(),
                num_splits=self.num_splits,
                edge_features=None if attr is None else 0 if attr.dim() == 1 else attr.shape[1],
            )
        return self._stats

    def edge_index(self) -> Tensor:
        """Edges ``[2, E]`` int64, sources above destinations, in CSR order."""
        return torch.stack([self.adj.indices.long(), self.adj.rows().long()])

    # ---- making another of it ------------------------------------------------------------------------

    def _changed(self, **changes: Any) -> Graph:
        names = ("adj", "x", "y", *SPLITS, "relation", "name")
        several = changes.pop("several", () if set(changes) & set(SPLITS) else self._several)
        fields = {name: getattr(self, name) for name in names} | changes
        counts = {"num_classes": self._num_classes, "num_relations": self._num_relations}
        graph = Graph(**fields, **counts, several=several, numbers=self._numbers)
        graph.notes, graph.ids = self.notes, self.ids
        return graph

    def noted(self, note: str) -> Graph:
        """The same graph with a remark on what was left out or changed on reading, which runs show."""
        graph = self._changed()
        graph.notes = (*self.notes, note)
        return graph

    def to(self, device: torch.device | str) -> Graph:
        """The same graph on another device."""
        device = torch.empty(0, device=device).device  # "cuda" is a particular one
        names = ("adj", "x", "y", *SPLITS, "relation")
        held = {name: getattr(self, name) for name in names}
        moved = {name: None if value is None else value.to(device) for name, value in held.items() if name != "adj"}
        moved["adj"] = self.adj.moved(device)
        moved["relation"] = moved["adj"].relation  # moved with the edges
        if all(moved[name] is held[name] for name in names):
            return self
        several = tuple(Split(*(ids.to(device) for ids in split)) for split in self._several)
        graph = self._changed(**moved, several=several)
        graph._stats = self._stats
        return graph

    @property
    def num_splits(self) -> int:
        """How many splits there are; ``train``, ``val`` and ``test`` are the first."""
        return max(len(self._several), 1)

    def split_rows(self, number: int | None) -> Split:
        """The nodes of one split; of a graph with one split always that."""
        if not self._several:
            return Split(self.train, self.val, self.test)
        number = number or 0
        if not 0 <= number < self.num_splits:
            raise GraphError(
                f"graph {self.name!r} has {self.num_splits} splits, 0..{self.num_splits - 1}, not {number}"
            )
        return self._several[number]

    def train_share(self, number: int = 0) -> float:
        """The share of the training nodes of split ``number`` that this process has: all, unless ranks share them."""
        return 1.0

    def split(self, number: int) -> Graph:
        """The same graph with one of its splits, sharing everything else."""
        if not self._several and number == 0:
            return self
        if not self._several:
            raise GraphError(f"graph {self.name!r} has 1 split, number 0, not {number}")
        return self._changed(**self.split_rows(number)._asdict())

    def random_splits(
        self,
        count: int,
        train: float = 0.6,
        val: float = 0.2,
        test: float | None = None,
        seed: int = 0,
        kind: str = "random",
    ) -> Graph:
        """The same graph with ``count`` random splits, of the seeds ``seed``, ``seed + 1``, ...: see random_split."""
        if count < 1:
            raise GraphError(f"count={count!r}: give the number of splits, at least 1")
        drawn = [self.random_split(train, val, test, seed + number, kind) for number in range(count)]
        return self._with_several([Split(graph.train, graph.val, graph.test) for graph in drawn])

    def k_fold(self, folds: int, seed: int = 0, stratified: bool = False) -> Graph:
        """The same graph with one split per fold: that fold to test on, the next to validate on, the rest to train on.

        A task with ``split="all"`` trains on each. ``stratified``: every fold has the classes in the same shares.
        """
        return self._with_several(fold_splits(*self._labelled("stratified" if stratified else "random", folds, seed)))

    def _labelled(self, kind: str, *arguments: Any) -> tuple[Any, ...]:
        """The labelled nodes, ``arguments``, and the classes of these nodes if a split of this kind is by class."""
        nodes = torch.arange(self.num_nodes, device=self.device)
        if self.y is not None and not self.multilabel:
            nodes = nodes[~validate.lacks_number(self.y) if self.regression else self.y >= 0]
        if kind == "random":
            return nodes, *arguments, None
        if self.y is None or self.multilabel or self.regression:
            raise GraphError(f"a {kind} split goes by class, and graph {self.name!r} has no class per node")
        return nodes, *arguments, self.y[nodes].cpu()

    def _with_several(self, splits: list[Split]) -> Graph:
        return self._changed(**splits[0]._asdict(), several=splits if len(splits) > 1 else ())

    def with_splits(self, train: Any = None, val: Any = None, test: Any = None) -> Graph:
        """The same graph with other splits: boolean masks ``[N]`` or node ids.

        Masks ``[N, S]`` are S splits, a column each; a task chooses one with ``split=``, or ``"all"`` of them.
        """
        columns = columns_of(train, val, test)
        if columns is not None:
            return self._with_several([self._checked_split(*column) for column in columns])
        return self._changed(**self._checked_split(train, val, test)._asdict())

    def _checked_split(self, train: Any, val: Any, test: Any) -> Split:
        parts = zip(SPLITS, (train, val, test), strict=True)
        ids = {name: as_split(part, self.num_nodes, name, self.device) for name, part in parts}
        for first, second in (("train", "val"), ("train", "test"), ("val", "test")):
            shared = ids[first][torch.isin(ids[first], ids[second])]
            if shared.numel():
                raise GraphError(
                    f"node {int(shared[0])} is in both the {first} and the {second} split "
                    f"({shared.numel()} shared nodes); a node may be in one split only"
                )
        if self.y is not None:
            for name in SPLITS:
                validate.check_labelled(self.y, ids[name], name)
        return Split(**ids)

    def random_split(
        self, train: float = 0.6, val: float = 0.2, test: float | None = None, seed: int = 0, kind: str = "random"
    ) -> Graph:
        """The same graph with its labelled nodes split at random, the same for the same seed on any device.

        An integer is a number of nodes, a float a share; ``test=None`` takes all that remain. ``kind="stratified"``:
        every part has the classes in the same shares. ``kind="per_class"``: ``train`` is a number of nodes of every
        class, ``val`` and ``test`` are of all others (``random_split(20, 500, 1000, kind="per_class")`` is the
        Planetoid rule).
        """
        if kind not in SPLIT_KINDS:
            raise GraphError(f"kind={kind!r}: must be one of {', '.join(SPLIT_KINDS)}")
        parts = random_split(*self._labelled(kind, train, val, test, seed, kind))
        return self._changed(**dict(zip(SPLITS, parts, strict=True)))

    def with_one_hot_features(self) -> Graph:
        """The same graph with one feature per node, its own, kept sparse: for nodes that have none."""
        return self._changed(x=SparseFeatures.identity(self.num_nodes, self.device))

    def verify(self) -> Graph:
        """Every check on every value; raises a GraphError at the first that fails, returns the graph."""
        adj = self.adj
        validate.check_offsets(adj.indptr, adj.num_edges)
        validate.check_range(adj.indices, adj.num_rows, "indices")
        validate.check_ascending(adj.indptr, adj.indices)
        edge_values(adj.weight, self.relation, adj.edge_attr, adj.indices)
        check_relations(self.relation, self.num_relations or None)
        if adj.symmetric and not is_symmetric(adj):
            raise GraphError(f"graph {self.name!r} says it is symmetric but differs from its transpose; rebuild it")
        if isinstance(self.x, SparseFeatures):
            check_csr(self.x.matrix.indptr, self.x.matrix.indices, self.num_features)
        as_features(self.x)
        column = self.regression and self.y is not None and self.y.dim() == 1
        as_labels(self.y[:, None] if column and self.y is not None else self.y)
        for number in range(self.num_splits):
            self.with_splits(*self.split_rows(number))
        return self

    # ---- leaving -------------------------------------------------------------------------------------

    def to_pyg(self) -> Any:
        """A PyG ``Data`` with boolean masks; sparse features become dense, as PyG's layers expect."""
        return convert.to_pyg(self)

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> None:
        """Write the graph as a folder that :func:`weft.load` maps back at once."""
        from weft.graph import saved as store

        store.save(self, path, overwrite=overwrite)


# Of PyG's objects that were given as graphs, by their ids while they exist (a Data has no hash): their tensors with
# the versions that torch counts, and the graph.
_CONVERTED: dict[int, tuple[list[tuple[Tensor, int]], Graph]] = {}


def as_graph(value: Any) -> Graph | None:
    """``value`` if it is a graph, or the graph that a ``Data`` or a dataset of PyG is; None for anything else.

    An object of PyG is converted once, and again if a tensor in it was replaced or changed in place. The graph shares
    its tensors where types allow.
    """
    if isinstance(value, Graph) or not convert.is_pyg(value):
        return value if isinstance(value, Graph) else None
    held = [part for store in getattr(value, "stores", ()) for part in store.values() if isinstance(part, Tensor)]
    tensors, graph = _CONVERTED.get(id(value), ([], None))
    as_before = [(id(part), part._version) for part in held] == [(id(part), version) for part, version in tensors]
    if graph is None or not as_before:
        graph = Graph.from_pyg(value, name=str(getattr(value, "name", None) or type(value).__name__))
        if id(value) not in _CONVERTED:
            finalize(value, _CONVERTED.pop, id(value), None)
        _CONVERTED[id(value)] = [(part, part._version) for part in held], graph
    return graph


def degree_histogram(degrees: Tensor) -> tuple[int, ...]:
    """How many degrees have each bit length."""
    # frexp's exponent of a float64 is the exact bit length of an integer below 2^53, and 0 for 0.
    lengths = torch.frexp(degrees.double()).exponent
    return tuple(torch.bincount(lengths).tolist())


def check_ids(graph: Graph) -> None:
    """Raise a GraphError unless every id leads to a row that exists: what a kernel would otherwise read past.

    A saved folder is mapped and not read when it is opened, so a damaged one is first noticed here. This reads row
    offsets, edges, ids of splits and labels once, in blocks and without a copy: 2 ms per 10 M edges on one core if
    they are in memory, else the time to read 4 bytes per edge from the disk, which training would spend right after.
    """
    matrices = [(graph.adj, "", "node ids")]
    matrices += [(graph.x.matrix, "x_", "feature ids")] if isinstance(graph.x, SparseFeatures) else []
    try:
        for matrix, prefix, kind in matrices:
            validate.check_offsets(matrix.indptr, matrix.num_edges, f"{prefix}indptr")
            validate.check_range(matrix.indices, matrix.num_cols, f"{prefix}indices", kind)
        if graph.relation is not None:
            validate.check_range(graph.relation, graph.num_relations, "relation", "relation numbers")
        for split in SPLITS:
            validate.check_range(getattr(graph, split), graph.num_nodes, split)
        classes = graph.y is not None and graph.y.dim() == 1 and not graph.regression
        if classes and not validate.all_between(graph.y, -1, graph.num_classes - 1):
            raise GraphError(f"y has a class outside 0..{graph.num_classes - 1} (-1: no label)")
    except GraphError as error:
        raise GraphError(
            f"graph {graph.name!r} cannot be trained on: {error}; save it again, or build it with from_edges"
        ) from None
