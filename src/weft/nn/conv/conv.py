"""Conv: base class of graph convolutions, with a bias, an optional residual and an optional epilogue."""

from __future__ import annotations

from torch import Tensor

from weft.nn.checks import check_count
from weft.nn.epilogue import Ending, Epilogue
from weft.nn.features import Features, check_features, transform_own
from weft.nn.initial import Initial, Parametrised, glorot
from weft.ops import Adjacency
from weft.ops.dense.linear import needs_gradient


class Conv(Parametrised):
    """``y = epilogue(propagate(x, A) + R x, b)``; R x only with ``residual=True``; ``y = ... + b`` plainly.

    Shapes: ``x [N, in_features]``, ``R [out_features, in_features]``, ``b`` and the result's rows
    ``[out_features]``. ``R`` is learned in every layer, as in PyG's attention layers.

    A subclass declares its weights and writes :meth:`propagate`; one whose aggregation of the input is the
    same in every step also writes :meth:`aggregate`.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = check_count("in_features", in_features)
        self.out_features = check_count("out_features", out_features)

    def declare_ends(self, bias: Initial | None, residual: bool) -> None:
        """Register the residual's weight and the bias, after a subclass's own weights."""
        shape = (self.out_features, self.in_features)
        self.declare("weight_residual", shape, glorot(*shape) if residual else None)
        self.declare("bias", (self.out_features,), bias)

    def forward(
        self, x: Features, adj: Adjacency, *, first: Tensor | None = None, epilogue: Epilogue | None = None
    ) -> Tensor:
        """``x [N, in_features]`` over the plain adjacency to ``[N, out_features]``.

        ``first`` is :meth:`aggregate` of the same ``x`` and ``adj``, if it was computed before.
        ``epilogue`` takes the result and the bias, so that norm, activation and dropout need no extra pass.
        """
        check_features(type(self).__name__, x, self.in_features)
        residual = None if self.weight_residual is None else transform_own(x, self.weight_residual, adj)
        return self.propagate(x, adj, first, Ending(self.bias, epilogue, residual))

    def propagate(self, x: Features, adj: Adjacency, first: Tensor | None, ending: Ending) -> Tensor:
        """The convolution, finished by ``ending``, ``[N, out_features]``."""
        raise NotImplementedError

    def aggregate(self, x: Tensor, adj: Adjacency) -> Tensor | None:
        """This layer's aggregation of a constant dense ``x``, or None if it depends on weights."""
        return None

    def aggregates_input(self, x: Tensor) -> bool:
        """Whether a constant dense ``x`` is better aggregated before it is multiplied."""
        return not needs_gradient(x) and aggregates_first(self.in_features, self.out_features, True)

    def extra_repr(self) -> str:
        """The widths."""
        return f"{self.in_features}, {self.out_features}"


def aggregates_first(in_features: int, out_features: int, constant_input: bool) -> bool:
    """Whether ``(A X) W`` costs less than ``A (X W)``: they are equal, and the narrower side is cheaper.

    Equal widths aggregate first, since the epilogue can be fused into a product. If the input needs no
    gradient, ``(A X) W`` has no backward aggregation, so its side counts as half as wide.
    """
    return in_features <= (2 * out_features if constant_input else out_features)
