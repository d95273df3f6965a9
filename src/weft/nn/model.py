"""GNN: layers of one kind with epilogues between them. The five named models are this with their layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from weft.core.errors import InputError
from weft.nn.checks import check_choice, check_count, check_rate
from weft.nn.conv.conv import Conv
from weft.nn.dropout import Dropout, assign_sites
from weft.nn.epilogue import ACTIVATIONS, Epilogue
from weft.nn.features import Features, check_features
from weft.nn.norm import NORMS
from weft.ops import Adjacency

MakeConv = Callable[[int, int, int], Conv]
Blocks = Adjacency | Sequence[Adjacency]


def blocks_of(adj: Blocks, layers: int) -> Sequence[Adjacency]:
    """The adjacency of every layer; one that is given alone serves them all."""
    if isinstance(adj, Adjacency):
        return [adj] * layers
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
        self.convs = nn.ModuleList(conv(place, widths[place], widths[place + 1]) for place in range(layers))
        self.epilogues = nn.ModuleList(
            Epilogue(hidden, norm, activation, check_rate("dropout", dropout)) for _ in range(layers - 1)
        )
        self.input_dropout = Dropout(check_rate("input_dropout", input_dropout or 0.0))
        assign_sites(self)

    def forward(self, x: Features, adj: Blocks, first: Tensor | None = None) -> Tensor:
        """Logits ``[N, out_features]`` of ``x [N, in_features]`` over the plain adjacency.

        ``adj`` is one adjacency for all layers, or a sequence with a block per layer: the rows of each are the columns
        of the next, and the logits are those of the last one's rows.
        ``first`` is what :meth:`first_aggregate` gave for the same ``x`` and ``adj``.
        """
        if first is not None and self.input_dropout.p > 0.0:
            raise InputError(
                f"{type(self).__name__}: first= needs the same input in every step, "
                f"but input_dropout={self.input_dropout.p:g} changes it"
            )
        check_features(type(self).__name__, x, self.in_features)
        x = self.input_dropout(x)
        blocks = blocks_of(adj, len(self.convs))
        for place, conv in enumerate(self.convs):
            epilogue = self.epilogues[place] if place < len(self.epilogues) else None
            x = conv(x, blocks[place], first=first if place == 0 else None, epilogue=epilogue)
        return x

    @torch.no_grad()
    def first_aggregate(self, x: Features, adj: Blocks) -> Tensor | None:
        """What the first layer aggregates of ``x``, to be computed once and given to every forward pass.

        None where it changes from step to step (input dropout, attention) or is better not written out
        (sparse features).
        """
        if self.input_dropout.p > 0.0 or not isinstance(x, Tensor):
            return None
        return self.convs[0].aggregate(x, blocks_of(adj, len(self.convs))[0])
