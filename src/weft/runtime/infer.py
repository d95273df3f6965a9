"""Logits and embeddings of a trained model on a graph, as evaluation computes them; and how a result calls it.

A training may divide features by their sums (``feature_norm="row"``) and makes sparse ones dense for modules that take
tensors. A module that is handed back does the same when it is called, so that ``model(graph.x, graph.adj)`` is what was
trained. Dividing by sums twice changes nothing but rounding.

Shapes: N nodes, M requested nodes, F features, C classes, Z stored values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from weft.batches.block import local_adjacency
from weft.batches.features import FeatureStore
from weft.batches.source import Batch, Features
from weft.core.errors import ModelError, SpecError, WeftError
from weft.core.placement import EVALUATION_EDGES
from weft.core.settings import Rule, read_fanout
from weft.core.task import Task
from weft.core.wording import option
from weft.graph.graph import Graph
from weft.graph.sparse_features import SparseFeatures
from weft.nn.models import is_named_model
from weft.ops.csr.adjacency import Adjacency, offset_dtype
from weft.runtime.device.process import DTYPES, matmul_precision, seeded
from weft.runtime.step.inputs import bind, edge_arguments, layers_of, takes_blocks, takes_edges, treated
from weft.runtime.step.losses import first_tensor

WHOLE_BYTES = 1 << 32  # of a pass over the whole graph: beyond, a model that can is run layer by layer
SMALL_EDGES = 1 << 15  # of a graph: up to there a pass takes less than any neighbourhood (demo: 0.9 and 1.7 ms)
BUILDING = 2  # a pass over a neighbourhood that has to be built takes so many times that of the same edges
EDGE_BYTES = 64  # of an edge of a chunk, besides its features
SAMPLED_AT_ONCE, MOST_SAMPLERS = 4096, 3  # nodes; samplers that are kept besides the one in use
LAST_HIDDEN = "last hidden"
LAYERWISE, SEED = Rule(bool, optional=True), Rule(int, optional=True, low=0, below=2**62)


@dataclass
class TrainedInputs:
    """A hook before ``forward``: ``norm`` divides the features, ``dense`` fills in their zeros.

    ``edges``: an :class:`Adjacency` becomes the ``edge_index`` that the module takes.
    """

    norm: str | None
    dense: bool
    edges: bool
    active: bool = field(default=True, compare=False)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.active:
            return None
        if args:
            args = (self._features(args[0]), *args[1:])
        elif "x" in kwargs:
            kwargs = {**kwargs, "x": self._features(kwargs["x"])}
        if self.edges and len(args) > 1 and isinstance(args[1], Adjacency):
            kwargs = {**edge_arguments(model, args[1]), **kwargs}
            args = (args[0], *args[2:])
        return args, kwargs

    def converted(self, dense: bool) -> TrainedInputs:
        """The hook of the same model with layers of another library; ``dense``: they take dense features only."""
        return TrainedInputs(self.norm, dense, edges=False)

    def _features(self, x: Any) -> Any:
        if hasattr(x, "edge_index") and hasattr(x, "x"):  # a Data of PyG
            x = copy(x)
            x.x = self._features(x.x)
            return x
        if not isinstance(x, (Tensor, SparseFeatures)):
            return x
        return treated(x, self.norm, x.dtype, self.dense)


def treat_inputs(model: nn.Module, task: Task, dense: bool) -> nn.Module:
    """``model`` with a hook for what it was trained on, if that is not just what a graph holds."""
    edges = task.traits is None and takes_edges(model)
    if task.feature_norm is not None or dense or edges:
        model.register_forward_pre_hook(TrainedInputs(task.feature_norm, dense or edges, edges), with_kwargs=True)
    return model


@dataclass(eq=False, repr=False)
class Predictor:
    """``model``, which is on ``device``, and ``graph``, which may be anywhere, ready to predict for nodes.

    Logits of some nodes need the nodes within as many hops as the model has layers. If layers can be run alone, only
    these are computed (``restrict``), unless the whole graph takes less: building a neighbourhood costs about as much
    as aggregating over it. ``layerwise``: the whole graph one layer after the other in chunks of nodes, in bounded
    memory (None: if a pass over it would take more than ``room`` bytes). ``keep``: many requests follow, so the first
    one computes the whole graph, if that fits, and its logits are kept: on the products shape it costs no more than the
    neighbourhoods of five requests for ten nodes. ``computed``: how the last request was answered.
    """

    model: nn.Module
    task: Task
    graph: Graph
    device: torch.device
    layerwise: bool | None = None
    restrict: bool = True
    room: int = WHOLE_BYTES
    keep: bool = False

    def __post_init__(self) -> None:
        graph, self.computed = self.graph, ""
        # A subclass of a model of Weft's may mix rows between its layers.
        self._layers = layers_of(self.model) if is_named_model(self.model) else None
        self._run, self._dtype = bind(self.model), DTYPES[self.task.precision]
        LAYERWISE.check("", "layerwise", self.layerwise)
        if self.layerwise and self._layers is None:
            raise SpecError(
                f"task {self.task.label!r}: {option('layerwise', True)} needs one of Weft's own models, not "
                f"{self.task.model_name}, whose rows may depend on all others; leave it out"
            )
        whole = self._bytes(graph.num_nodes, graph.num_edges)
        layerwise = whole > self.room if self.layerwise is None else self.layerwise
        self._layerwise = self._layers is not None and layerwise
        some = self.restrict and graph.num_edges > SMALL_EDGES and graph.device.type in ("cpu", self.device.type)
        self._restrict = some and (self._layerwise or not self.keep)
        self._samplers: dict[Any, Any] = {}
        self._logits: Tensor | None = None  # of all nodes, if they are kept

    @cached_property
    def _rows(self) -> FeatureRows:
        return FeatureRows(self.graph.x, self.task.feature_norm, self._dtype, self.device)

    def __call__(
        self, nodes: Tensor, *, layer: int | str | None = None, fanout: Any = None, seed: int | None = None
    ) -> Tensor:
        """Logits ``[M, C]`` float32 of ``nodes [M]``, on the CPU.

        ``layer``: what that layer returns instead, by its number from 1 or, of a user's module, by the name of a part;
        :data:`LAST_HIDDEN`: what the last layer is given. ``fanout``: sampled neighbours per hop, drawn by ``seed`` (0
        unless given); unless they are one local subgraph, those of a node do not depend on the other nodes.
        """
        hops, drawn_by = None if fanout is None else read_fanout(fanout), SEED.check("", "seed", seed) or 0
        if seed is not None and hops is None:
            raise SpecError(f"{option('seed', seed)} would have no effect: nothing is drawn without {option('fanout')}")
        if layer is None and fanout is None and self._logits is not None:
            self.computed = "kept"
            return self._logits[nodes]
        count = self._layers if layer is None else self._number(layer)
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(seeded(self.task.seed, self.device))
            stack.enter_context(matmul_precision(self.task.precision))
            stack.enter_context(_as_evaluated(self.model, self._dtype))
            if hops is not None and self._layers is not None and len(hops) != self._layers:
                raise SpecError(f"fanout={fanout} has {len(hops)} hops for {self._layers} layers; give one per layer")
            if hops is None or not nodes.numel():
                return self._exact(nodes, layer, count).float().cpu()
            ids, positions = nodes.unique(return_inverse=True)  # of a repeated row a loop would lead to the first
            return self._sampled(ids, hops[:count], drawn_by, layer).float().cpu()[positions]

    def _number(self, layer: int | str) -> int | None:
        """How many layers are run to get what ``layer`` returns; None: the model is called, and a part of it taken."""
        if isinstance(layer, str) and (layer != LAST_HIDDEN or self._layers is None):
            return None
        if self._layers is None:
            raise SpecError(f"layer={layer}: layers of {self.task.model_name} have no numbers; give the name of one")
        number = self._layers - 1 if layer == LAST_HIDDEN else layer
        if self._layers == 1:
            raise SpecError(f"task {self.task.label!r}: a model with layers=1 has no hidden layer")
        if isinstance(number, bool) or number not in range(1, self._layers):
            raise SpecError(f"layer={layer}: must be the number of a hidden layer, from 1 to {self._layers - 1}")
        return int(number)

    # ---- exact -----------------------------------------------------------------------------------------------

    def _exact(self, nodes: Tensor, layer: int | str | None, count: int | None) -> Tensor:
        """From all neighbours: of the nodes' neighbourhoods, or of the whole graph."""
        parts, some = None, 0 < nodes.numel() < self.graph.num_nodes
        if count is not None and self._restrict and some:
            ids, positions = nodes.unique(return_inverse=True)
            parts = self._neighbourhood(ids, count)
        self.computed = "whole graph" if parts is None else "neighbourhoods"
        if parts is not None:
            return self._through(*parts).index_select(0, positions.to(self.device))
        if layer is not None or not self.keep:
            return self._whole(nodes, layer, count)
        # In host memory: a lookup on a GPU that trains took 8 ms, waiting for its turn.
        self._logits = self._whole(torch.arange(self.graph.num_nodes), layer, count).float().cpu()
        return self._logits[nodes]

    def _bytes(self, nodes: int, edges: int) -> int:
        """About what a pass holds at once: features, two activations, and the edges."""
        features = 0 if isinstance(self.graph.x, SparseFeatures) else self.graph.num_features
        return 4 * nodes * (features + 2 * max(self.task.hidden, self.graph.num_classes)) + 8 * edges

    def _neighbourhood(self, nodes: Tensor, hops: int) -> tuple[list[Adjacency], Tensor] | None:
        """A block per layer and the features that the first one needs; None if the whole graph costs less."""
        indptr, blocks, edges, needed = self.graph.adj.indptr, [], 0, nodes.to(self.graph.device)
        # Of a graph that does not fit as a whole only memory counts: what does not fit is computed in chunks.
        most = inf if self._layerwise else self.graph.num_edges * hops / BUILDING
        for left in range(hops, 0, -1):
            ids = needed.long()
            count = int((indptr[ids + 1] - indptr[ids]).sum())
            if edges + left * count > most or self._bytes(needed.numel(), edges + count) > self.room:
                return None  # later blocks have no fewer rows
            sampled = self._sampler((-1,)).sample(needed)
            blocks.append(sampled.to(self.device).blocks[0].adjacency())
            needed, edges = sampled.input_nodes, edges + count
        return None if self._bytes(needed.numel(), edges) > self.room else (blocks[::-1], self._rows.read(needed))

    def _through(self, blocks: Sequence[Adjacency], values: Any) -> Tensor:
        """Layer by layer through ``blocks``, from the features of the first one's columns."""
        for index, adj in enumerate(blocks):
            values = self._run(self._batch(values, adj, index))
        return values

    def _batch(self, x: Features, adj: Adjacency | Sequence[Adjacency], layer: int | None = None) -> Batch:
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        return Batch(x, adj, none, none, torch.ones(1, device=self.device), layer=layer)

    def _whole(self, nodes: Tensor, layer: int | str | None, count: int | None) -> Tensor:
        """Of ``nodes``, by a pass over the whole graph."""
        if self._layerwise and count is not None:
            return self._by_layers(nodes, count)
        adj, dense = self.graph.adj.to(self.device), takes_edges(self.model)
        x = treated(self.graph.x.to(self.device), self.task.feature_norm, self._dtype, dense)
        if layer is not None and count is not None:
            return self._through([adj] * count, x).index_select(0, nodes.to(self.device))
        try:
            values = self._called(self._batch(x, adj), layer)
        except (torch.OutOfMemoryError, WeftError):
            raise
        except Exception:
            if self.task.traits is not None or isinstance(x, Tensor):
                raise
            values = self._called(self._batch(x.to_dense(), adj), layer)  # as its training found out
        return values.index_select(0, nodes.to(self.device))

    def _called(self, batch: Batch, layer: int | str | None) -> Tensor:
        """What the whole model returns for a batch, or what a part of it does."""
        if isinstance(layer, str):
            return part_values(self.model, self.task, lambda: self._run(batch), batch.x, layer)
        output = self._run(batch)
        logits = first_tensor(output)  # there may be an auxiliary loss as well
        rows = batch.blocks.num_rows if isinstance(batch.blocks, Adjacency) else batch.blocks[-1].num_rows
        if logits is None or logits.shape[:1] != (rows,):
            what = f"shape {list(logits.shape)}" if isinstance(logits, Tensor) else type(output).__name__
            model = f"task {self.task.label!r}: model {self.task.model_name}"
            raise ModelError(f"{model} returned {what}, not a row per node")
        return logits

    def _by_layers(self, nodes: Tensor, count: int) -> Tensor:
        """Layer by layer in chunks of nodes, only what ``nodes`` depend on."""
        from weft.batches.layerwise import LayerWise  # samplers, which a run without batches does not need

        def infer(batch: Batch) -> Tensor:
            """One member: from the second layer on features have a leading dimension per member."""
            return self._run(replace(batch, x=batch.x[0]) if batch.layer else batch)[None]

        graph = self.graph
        y = torch.zeros(1, dtype=torch.int64, device=graph.device).expand(graph.num_nodes)  # nothing reads them
        relations = {"relation": graph.relation, "num_relations": graph.num_relations}
        part = Graph(graph.adj, graph.x, y, test=nodes.to(graph.device).unique(), num_classes=1, **relations)
        width = max(graph.num_features, self.task.hidden, graph.num_classes)
        edges = max(min(EVALUATION_EDGES, self.room // (8 * width + EDGE_BYTES)), 1)
        passes = LayerWise(part, self._rows, self.device, edges)
        values = passes.logits(infer, count)[0]
        return values.index_select(0, passes.rows(nodes.to(graph.device)))

    # ---- sampled ---------------------------------------------------------------------------------------------

    def _sampler(self, hops: tuple[Any, ...], local: bool = False) -> Any:
        """Samples neighbours for blocks, or for a ``local`` subgraph; the last ones are kept."""
        from weft.batches.sampler import NeighbourSampler, resolved  # which a run without batches does not need

        hops, traits = resolved(hops, self.graph), self.task.traits
        if (hops, local) not in self._samplers:
            plain = all(isinstance(hop, int) for hop in hops) and not local
            normalised = plain and (traits is None or traits.weighted is not False)  # GCN alone reads degrees
            options = {"subgraph": local, "edge_attr": local and self.graph.edge_attr is not None}
            degrees = "full" if normalised else "sampled"
            made = NeighbourSampler(self.graph, hops, degrees=degrees, device=self.graph.device, **options)
            self._samplers = {**dict(list(self._samplers.items())[-MOST_SAMPLERS:]), (hops, local): made}
        return self._samplers[hops, local]

    def _sampled(self, nodes: Tensor, hops: tuple[Any, ...], seed: int, layer: int | str | None) -> Tensor:
        """From sampled neighbours, as the batches of a sampled training: a block per layer, or a local subgraph."""
        local = not takes_blocks(self.model)
        for name, part in self.model.named_modules():
            if getattr(part, "cached", False) is True:  # a layer of PyG
                raise SpecError(
                    f"task {self.task.label!r}: {name} has cached=True, and would use the edges of the first graph "
                    "that it was called with instead of sampled ones; train it with cached=False"
                )
        self.computed, parts, sampler = "samples", [], self._sampler(hops, local)
        sampler.seed = seed
        for seeds in nodes.to(self.graph.device).split(SAMPLED_AT_ONCE):
            sampled = sampler.sample(seeds).to(self.device)
            x = self._rows.read(sampled.input_nodes)
            blocks = local_adjacency(sampled) if local else [block.adjacency() for block in sampled.blocks]
            layered = self._layers is not None and not (isinstance(layer, str) and layer != LAST_HIDDEN)
            parts.append(self._through(blocks, x) if layered else self._called(self._batch(x, blocks), layer))
            parts[-1] = parts[-1][: seeds.numel()]
        return torch.cat(parts)


def part_values(model: nn.Module, task: Task, call: Callable[[], Any], x: Any, layer: str) -> Tensor:
    """What the part ``layer`` of ``model`` returns in ``call()``; of :data:`LAST_HIDDEN` what its last layer is given.

    The last layer is the outermost part with weights whose result is the output, as it is or after a softmax, and which
    is given something else than the features ``x``. A :class:`SpecError` if there is none.
    """
    calls: list[tuple[str, Any, Any]] = []  # in the order of their ends: an outer part after those inside it
    parts = {name: part for name, part in model.named_modules() if name}

    def note(name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        calls.append((name, first, first_tensor(output)))

    hooks = [part.register_forward_hook(partial(note, name), with_kwargs=True) for name, part in parts.items()]
    try:
        output = first_tensor(call())
    finally:
        for hook in hooks:
            hook.remove()

    def is_last(name: str, given: Any, values: Any) -> bool:
        weights = next(parts[name].parameters(), None) is not None and type(parts[name]).__name__ != "Sequential"
        if given is None or given is x or not weights or values is None or values.shape != output.shape:
            return False
        return any(torch.equal(end, output) for end in (values, values.log_softmax(-1), values.softmax(-1)))

    if layer == LAST_HIDDEN and output is not None:
        found = [given for name, given, values in reversed(calls) if is_last(name, given, values)]
    else:
        found = [values for name, _, values in reversed(calls) if name == layer]
    if not found or found[0] is None or found[0].dim() != 2 or len(found[0]) != x.shape[0]:
        what = "cannot tell what its last hidden layer is" if layer == LAST_HIDDEN else f"no rows from a part {layer!r}"
        names = f"give layer=, the name of a part: {', '.join(list(parts)[:8])}"
        raise SpecError(f"task {task.label!r}: model {task.model_name}: {what}; {names}")
    return found[0]


@contextmanager
def _as_evaluated(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """``model`` as an evaluation calls it, with features that are treated already; restored afterwards.

    It is in evaluation mode, and the trained parameters are in ``dtype``, the type that a step computes with.
    """
    modes = [(module, module.training) for module in model.modules()]
    cast = [p for p in model.parameters() if p.requires_grad and p.is_floating_point() and p.dtype != dtype]
    weights = [parameter.data for parameter in cast]
    hooks = [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, TrainedInputs)]
    try:
        model.eval()
        for parameter in cast:
            parameter.data = parameter.data.to(dtype)
        for hook in hooks:
            hook.active = False
        yield
    finally:
        for hook in hooks:
            hook.active = True
        for parameter, data in zip(cast, weights, strict=True):
            parameter.data = data
        for module, training in modes:
            module.training = training


class FeatureRows:
    """Rows of ``x [N, F]`` as a training treats them, without treating all of them at once.

    They are on ``device``, divided by their sums if ``norm="row"``, dense, in ``dtype``.
    """

    def __init__(self, x: Features, norm: str | None, dtype: torch.dtype, device: torch.device) -> None:
        self._x, self._norm, self._dtype, self._device = x, norm, dtype, device
        self._store = FeatureStore(x, device) if isinstance(x, Tensor) else None

    def read(self, ids: Tensor) -> Tensor:
        """The rows ``[M, F]`` of ``ids [M]``."""
        rows = sparse_rows(self._x, ids) if self._store is None else self._store.read(ids)
        return treated(rows, self._norm, self._dtype, dense=True).to(self._device)


def sparse_rows(x: SparseFeatures, ids: Tensor) -> SparseFeatures:
    """The rows ``ids [M]`` of ``x [N, F]``, each as it is stored."""
    matrix = x.matrix
    ids = ids.to(matrix.device).long()
    begin, count = matrix.indptr[ids].long(), (matrix.indptr[ids + 1] - matrix.indptr[ids]).long()
    ends = count.cumsum(0)
    indptr = torch.cat([ends.new_zeros(1), ends])
    stored = torch.arange(int(ends[-1]) if ids.numel() else 0, device=matrix.device)
    stored += torch.repeat_interleave(begin - indptr[:-1], count)
    offsets = indptr.to(offset_dtype(stored.numel()))
    return SparseFeatures(Adjacency(offsets, matrix.indices[stored], matrix.num_cols, weight=x.values[stored]))
