"""The named models: GCN, SAGE, GIN, GAT, GATv2. See :class:`weft.nn.model.GNN` for what they share."""

from __future__ import annotations

from typing import Any

from weft.core.errors import SpecError
from weft.nn.checks import check_choice, check_count, check_rate
from weft.nn.conv.attention import AttentionConv
from weft.nn.conv.conv import Conv
from weft.nn.conv.gat import GATConv
from weft.nn.conv.gatv2 import GATv2Conv
from weft.nn.conv.gcn import GCNConv
from weft.nn.conv.gin import GINConv
from weft.nn.conv.sage import AGGREGATORS, SAGEConv
from weft.nn.model import GNN


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
        def conv(place: int, inputs: int, outputs: int) -> Conv:
            return GCNConv(inputs, outputs, residual=residual, constant_input=place == 0)

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

        def conv(place: int, inputs: int, outputs: int) -> Conv:
            return SAGEConv(inputs, outputs, aggregator, residual=residual, constant_input=place == 0)

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

        def conv(place: int, inputs: int, outputs: int) -> Conv:
            first = place == 0
            return GINConv(
                inputs,
                outputs,
                eps=eps,
                train_eps=train_eps,
                residual=residual,
                constant_input=first,
                **inner,
            )

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

        def conv(place: int, inputs: int, outputs: int) -> Conv:
            last = place == layers - 1
            return self.layer(
                inputs,
                outputs,
                heads=out_heads if last else heads,
                concat=not last,
                slope=slope,
                dropout=rate,
                residual=residual,
            )

        super().__init__(in_features, hidden, out_features, layers, dropout, conv=conv, **common)


class GAT(AttentionGNN):
    """Layers of :class:`GATConv`; arguments as in :class:`AttentionGNN` and :class:`GNN`."""

    layer = GATConv


class GATv2(AttentionGNN):
    """Layers of :class:`GATv2Conv`; arguments as in :class:`AttentionGNN` and :class:`GNN`."""

    layer = GATv2Conv
