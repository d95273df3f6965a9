"""The models and the table of their names: GCN, SAGE, GIN, GAT, GATv2 and RGCN.

Each is a GNN: layers of one kind with epilogues between them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.errors import InputError, SpecError
from weft.core.models import ModelTraits, registered_classes, with_traits
from weft.nn.checks import check_choice, check_count, check_rate, hint
from weft.nn.conv import AttentionConv, Conv, aggregates_first
from weft.nn.epilogue import ACTIVATIONS, NORMS, Dropout, Epilogue, assign_sites
from weft.nn.features import Features, check_features
from weft.nn.gat import GATConv, GATv2Conv
from weft.nn.gcn import GCNConv
from weft.nn.gin import GINConv
from weft.nn.rgcn import RGCNConv, check_decomposition
from weft.nn.sage import AGGREGATORS, SAGEConv
from weft.ops import Adjacency
from weft.ops.dense.linear import needs_gradient

MakeConv = Callable[[int, int, int], Conv]
Blocks = Adjacency | Sequence[Adjacency]


def blocks_of(adj: Blocks, layers: int) -> Sequence[Adjacency]:
    """The adjacency of every layer; one that is given alone serves them all."""
    if isinstance(adj, Adjacency):
        return [adj] * layers
    if isinstance(adj, Tensor) or not isinstance(adj, Sequence):
        raise InputError(
            f"the model takes x and an Adjacency (graph.adj), not a {type(adj).__name__}; result.predict(graph) treats "
            "features as in training, weft.nn.to_pyg(result.model) takes x and edge_index"
        )
    if len(adj) != layers:
        raise InputError(f"{len(adj)} blocks were given for {layers} layers; give one per layer, or one for all")
    return adj


class GNN(nn.Module):
    """``h_0 = dropout(x); h_l = dropout(act(norm(conv_l(h_l-1, A)))); logits = conv_L(h_L-1, A)``.

    Shapes: ``x [N, in_features]`` dense or sparse, ``h_l [N, hidden]``, logits ``[N, out_features]``.

    Arguments of every model:

    - ``in_features``, ``hidden``, ``out_features``: widths of the input, of every hidden layer, of the result.
    - ``layers``: convolutions in all; ``layers=1`` goes from input to result at once.
    - ``dropout``: rate after every hidden layer.
    - ``input_dropout``: rate on the input; None means none, which lets the first aggregation be shared.
      The standard settings for citation graphs have 0.5 (GCN) or 0.6 (GAT) here.
    - ``norm``: None, ``"batch"`` (over the nodes) or ``"layer"`` (over the features of a node).
    - ``residual``: every convolution adds a learned ``R h``.
    - ``activation``: ``"relu"``, ``"elu"`` or ``"none"``; None is the model's own.
    """

    own_activation = "relu"

    def __init__(
        self,
        in_features: int,
        hidden: int,
        out_features: int,
        layers: int = 2,
        dropout: float = 0.5,
        *,
        conv: MakeConv,
        input_dropout: float | None = None,
        norm: str | None = None,
        activation: str | None = None,
    ) -> None:
        super().__init__()
        self.in_features = check_count("in_features", in_features)
        self.hidden = check_count("hidden", hidden)
        self.out_features = check_count("out_features", out_features)
        activation = activation or self.own_activation
        check_choice("activation", activation, ACTIVATIONS)
        check_choice("norm", norm, NORMS)
        widths = [in_features, *[hidden] * (check_count("layers", layers) - 1), out_features]
        self.convs = nn.ModuleList(conv(index, widths[index], widths[index + 1]) for index in range(layers))
        self.epilogues = nn.ModuleList(
            Epilogue(hidden, norm, activation, check_rate("dropout", dropout)) for _ in range(layers - 1)
        )
        self.input_dropout = Dropout(check_rate("input_dropout", input_dropout or 0.0))
        assign_sites(self)

    def forward(self, x: Features, adj: Blocks, first: Tensor | None = None, layer: int | None = None) -> Tensor:
        """Logits ``[N, out_features]`` of ``x [N, in_features]`` over the plain adjacency.

        ``adj`` is one adjacency for all layers, or a sequence with a block per layer: the rows of each are the columns
        of the next, and the logits are those of the last one's rows.
        ``first`` is what :meth:`first_aggregate` gave for the same ``x`` and ``adj``. ``layer`` runs that layer alone,
        with what follows it: ``x`` is then its input, and ``adj`` its adjacency.
        """
        if layer is not None:
            x = self.input_dropout(x) if layer == 0 else x
            return self.convs[layer](x, adj, epilogue=self._epilogue(layer))
        if first is not None and self.input_dropout.p > 0.0:
            raise InputError(
                f"{type(self).__name__}: first= needs the same input in every step, "
                f"but input_dropout={self.input_dropout.p:g} changes it"
            )
        check_features(type(self).__name__, x, self.in_features)
        x = self.input_dropout(x)
        blocks = blocks_of(adj, len(self.convs))
        constant = isinstance(x, Tensor) and self.input_dropout.p == 0.0 and not needs_gradient(x)
        if first is None and not isinstance(adj, Adjacency) and constant:
            conv = self.convs[0]
            if aggregates_first(conv.in_features, conv.out_features, True):
                # Of a batch, without a gradient: tasks share it, and no transpose is built for it.
                with torch.no_grad():
                    first = conv.aggregate(x, blocks[0])
        for index, conv in enumerate(self.convs):
            x = conv(x, blocks[index], first=first if index == 0 else None, epilogue=self._epilogue(index))
        return x

    def _epilogue(self, index: int) -> Epilogue | None:
        """What follows layer ``index``: nothing after the last."""
        return self.epilogues[index] if index < len(self.epilogues) else None

    @torch.no_grad()
    def first_aggregate(self, x: Features, adj: Blocks) -> Tensor | None:
        """The first layer's aggregation of ``x``, to be computed once and passed to every forward pass.

        None if it changes from step to step (input dropout, attention) or should not be materialised
        (sparse features).
        """
        if self.input_dropout.p > 0.0 or not isinstance(x, Tensor):
            return None
        return self.convs[0].aggregate(x, blocks_of(adj, len(self.convs))[0])


class GCN(GNN):
    """Layers of :class:`GCNConv`; arguments as in :class:`GNN`."""

    def __init__(
        self,
        in_features: int,
        hidden: int,
        out_features: int,
        layers: int = 2,
        dropout: float = 0.5,
        *,
        residual: bool = False,
        **common: Any,
    ) -> None:
        def conv(index: int, inputs: int, outputs: int) -> Conv:
            return GCNConv(inputs, outputs, residual=residual, constant_input=index == 0)

        super().__init__(in_features, hidden, out_features, layers, dropout, conv=conv, **common)


class SAGE(GNN):
    """Layers of :class:`SAGEConv`; ``aggregator`` is ``"mean"``, ``"max"`` or ``"sum"``."""

    def __init__(
        self,
        in_features: int,
        hidden: int,
        out_features: int,
        layers: int = 2,
        dropout: float = 0.5,
        *,
        aggregator: str = "mean",
        residual: bool = False,
        **common: Any,
    ) -> None:
        check_choice("aggregator", aggregator, AGGREGATORS)

        def conv(index: int, inputs: int, outputs: int) -> Conv:
            return SAGEConv(inputs, outputs, aggregator, residual=residual, constant_input=index == 0)

        super().__init__(in_features, hidden, out_features, layers, dropout, conv=conv, **common)


class GIN(GNN):
    """Layers of :class:`GINConv`, whose inner width is that of their result; ``norm`` stands inside, too.

    ``eps`` is the fixed weight of a node's own features (less 1), learned with ``train_eps=True``.
    """

    def __init__(
        self,
        in_features: int,
        hidden: int,
        out_features: int,
        layers: int = 2,
        dropout: float = 0.5,
        *,
        eps: float = 0.0,
        train_eps: bool = False,
        residual: bool = False,
        norm: str | None = None,
        activation: str | None = None,
        **common: Any,
    ) -> None:
        inner = {"norm": norm, "activation": activation or self.own_activation}

        def conv(index: int, inputs: int, outputs: int) -> Conv:
            weights = {"eps": eps, "train_eps": train_eps, "residual": residual}
            return GINConv(inputs, outputs, constant_input=index == 0, **weights, **inner)

        common |= {"norm": norm, "activation": activation}
        super().__init__(in_features, hidden, out_features, layers, dropout, conv=conv, **common)


class AttentionGNN(GNN):
    """Layers with ``heads`` heads side by side, the last one with ``out_heads`` heads averaged.

    ``hidden`` is the width of a hidden layer with all its heads, so a head is ``hidden / heads`` wide (as in
    PyG's BasicGNN). ``attention_dropout`` falls on the coefficients; None means the same as ``dropout``.
    """

    own_activation = "elu"
    layer: type[AttentionConv]

    def __init__(
        self,
        in_features: int,
        hidden: int,
        out_features: int,
        layers: int = 2,
        dropout: float = 0.5,
        *,
        heads: int = 8,
        out_heads: int = 1,
        attention_dropout: float | None = None,
        slope: float = 0.2,
        residual: bool = False,
        **common: Any,
    ) -> None:
        for name, value in (("layers", layers), ("hidden", hidden), ("heads", heads), ("out_heads", out_heads)):
            check_count(name, value)
        if layers > 1 and hidden % heads:
            raise SpecError(
                f"hidden={hidden} must be a multiple of heads={heads}: it is the width of all heads together"
            )
        rate = check_rate("attention_dropout", dropout if attention_dropout is None else attention_dropout)

        def conv(index: int, inputs: int, outputs: int) -> Conv:
            last = index == layers - 1
            joined = {"heads": out_heads if last else heads, "concat": not last}
            return self.layer(inputs, outputs, **joined, slope=slope, dropout=rate, residual=residual)

        super().__init__(in_features, hidden, out_features, layers, dropout, conv=conv, **common)


class GAT(AttentionGNN):
    """Layers of :class:`GATConv`; arguments as in :class:`AttentionGNN` and :class:`GNN`."""

    layer = GATConv


class GATv2(AttentionGNN):
    """Layers of :class:`GATv2Conv`; arguments as in :class:`AttentionGNN` and :class:`GNN`."""

    layer = GATv2Conv


class RGCN(GNN):
    """Layers of :class:`RGCNConv` over the ``num_relations`` relations of the graph.

    ``bases`` or ``blocks`` share weights between relations. ``blocks`` must divide ``hidden``; a first or last layer
    whose features or classes it does not divide has one full matrix per relation.
    """

    def __init__(
        self,
        in_features: int,
        hidden: int,
        out_features: int,
        layers: int = 2,
        dropout: float = 0.5,
        *,
        num_relations: int,
        bases: int | None = None,
        blocks: int | None = None,
        residual: bool = False,
        **common: Any,
    ) -> None:
        check_decomposition(bases, blocks)
        if layers > 1 and blocks is not None and hidden % blocks:
            raise SpecError(f"hidden={hidden} must be a multiple of blocks={blocks}: the blocks are equal parts of it")

        def conv(index: int, inputs: int, outputs: int) -> Conv:
            divided = blocks if blocks and not inputs % blocks and not outputs % blocks else None
            return RGCNConv(inputs, outputs, num_relations, bases, divided, residual=residual)

        super().__init__(in_features, hidden, out_features, layers, dropout, conv=conv, **common)


# One class per row of weft.core.models.
CLASSES: Mapping[str, type[GNN]] = MappingProxyType(
    {"gcn": GCN, "sage": SAGE, "gin": GIN, "gat": GAT, "gatv2": GATv2, "rgcn": RGCN}
)


@contextmanager
def register_model(traits: ModelTraits, model: type[GNN]) -> Iterator[None]:
    """Make ``model`` known as ``traits.name`` inside the ``with`` block, as if it were built in.

    It is then trained alone, stacked and padded like the others, and planned by the numbers of ``traits``. Nothing is
    left of it after the block, and other threads do not see it.
    """
    check_row("register_model", traits, model)
    with with_traits(traits, model):
        yield


def check_row(where: str, traits: ModelTraits, model: Any) -> None:
    """A :class:`SpecError` for a class that does not take the settings of its row; ``where`` begins it."""
    if not (isinstance(model, type) and issubclass(model, GNN)):
        raise SpecError(f"{where}: {model!r} must be a subclass of weft.nn.GNN")
    missing = [name for name in traits.settings if name not in options_of(model)]
    if missing:
        raise SpecError(
            f"{where}: the row of {traits.name!r} lists {', '.join(missing)} among its settings, "
            f"but {model.__name__} takes {', '.join(options_of(model))}"
        )


def known_models() -> dict[str, type[GNN]]:
    """The class of every name: built in, registered in this thread, and of plug-ins that were used."""
    return {**CLASSES, **registered_classes()}


def is_named_model(model: nn.Module) -> bool:
    """Whether ``model`` is one of the named models, whose insides Weft knows; a subclass of theirs is not."""
    return type(model) in known_models().values()


def build(name: str, in_features: int, out_features: int, **options: Any) -> GNN:
    """The model ``name`` from ``in_features`` to ``out_features``; ``hidden`` is 64 unless given."""
    classes = known_models()
    if name not in classes:
        raise SpecError(f"model={name!r} must be one of {', '.join(classes)}{hint(name, classes)}")
    check_options(name, options)
    options.setdefault("hidden", 64)
    return classes[name](in_features, out_features=out_features, **options)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """A :class:`SpecError` for the first of ``options`` that the model ``name`` does not take."""
    takes = options_of(known_models()[name])
    for option in options:
        if option not in takes:
            advice = hint(option, takes) or f"; it takes {', '.join(takes)}"
            raise SpecError(f"model {name!r} has no option {option!r}{advice}")


def options_of(model: type[GNN]) -> tuple[str, ...]:
    """The options that :func:`build` takes for ``model``."""
    hidden_from_users = {"self", "in_features", "out_features", "conv", "common"}
    names: dict[str, None] = {}
    for ancestor in model.__mro__:
        if issubclass(ancestor, GNN) and "__init__" in vars(ancestor):
            names |= dict.fromkeys(inspect.signature(ancestor.__init__).parameters)
    return tuple(option for option in names if option not in hidden_from_users)
