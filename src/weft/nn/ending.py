"""Ending: the bias and the epilogue of a layer, handed to the layer's last operator so that they cost no pass more."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft import ops
from weft.nn.epilogue import Epilogue


@dataclass(frozen=True)
class Ending:
    """``epilogue(out + add, bias)``, or plainly ``out + add + bias`` without an epilogue.

    Shapes: ``bias [O]``, ``add [N, O]`` (a residual). A layer finishes with :meth:`linear` where its last step is a
    product, which takes everything into the product's own pass, and with :meth:`apply` otherwise.
    """

    bias: Tensor | None = None
    epilogue: Epilogue | None = None
    add: Tensor | None = None

    def apply(self, out: Tensor, also: Tensor | None = None, parts: int = 1) -> Tensor:
        """``out [N, O]`` finished; ``also [N, O]`` is added to it. ``parts``: heads side by side in O."""
        add = self._sum(also)
        out = out if add is None else out + add
        if self.epilogue is None:
            return ops.bias_act_dropout(out, self.bias)
        return self.epilogue(out, self.bias, parts)

    def linear(self, x: Tensor, weight: Tensor, also: Tensor | None = None) -> Tensor:
        """``x W^T`` finished, ``x [N, I]``, ``weight [O, I]``; ``also [N, O]`` is added to it."""
        add = self._sum(also)
        if self.epilogue is None:
            return ops.linear(x, weight, self.bias, add=add)
        if self.epilogue.norm is not None:
            return self.epilogue(ops.linear(x, weight, add=add), self.bias)
        rate, clock = self.epilogue.dropout.draw_fused(x.device)
        act, site = self.epilogue.activation, self.epilogue.dropout.site
        out = ops.linear(x, weight, self.bias, add=add, act=act, p=rate, clock=clock, site=site)
        return self.epilogue.dropout.drop_after(out)

    def _sum(self, also: Tensor | None) -> Tensor | None:
        if self.add is None or also is None:
            return also if self.add is None else self.add
        return self.add + also
