"""Dropout whose mask comes from a clock (seed, step), and the numbering of the sites that draw one.

A runner drives a model by binding one ``clock [2]`` = (task seed, step) to all of its modules; the mask is
then a function of (seed, step, site, element) alone. Outside a runner the clock is empty and
every call takes a fresh one from torch's generator, so ``torch.manual_seed`` governs a user's training loop.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from weft import ops
from weft.graph.sparse_features import SparseFeatures
from weft.nn.checks import check_rate
from weft.nn.features import DroppedFeatures, Features
from weft.ops.dense.bias_act_dropout import dropout_rows
from weft.ops.reduce import ONE_RANK, Reduce


class Dropout(nn.Module):
    """``y = keep / (1 - p) * x`` while training, ``y = x`` otherwise.

    Shapes: ``x [..., N, F]`` of any size, or sparse features, of which only the stored values are dropped (a
    zero stays a zero). ``clock`` is an int64 buffer, empty until a runner drives it; ``rate`` holds ``p`` as a
    0-d float32 buffer, so that tasks that share a step may differ in it; ``site`` numbers the modules of a model that
    draw masks.
    Rows that are spread over ranks (``reduce``) have the masks that they would have on one.
    """

    reduce: Reduce = ONE_RANK
    clock: Tensor
    rate: Tensor

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = check_rate("dropout", p)
        self.site = 0
        self.register_buffer("clock", torch.empty(0, dtype=torch.int64), persistent=False)
        self.register_buffer("rate", torch.tensor(self.p, dtype=torch.float32), persistent=False)

    def _apply(self, fn, recurse=True):
        # A rate of 0.6 must not become 0.6016 when the weights turn to bfloat16.
        super()._apply(fn, recurse)
        self.rate = torch.tensor(self.p, dtype=torch.float32, device=self.rate.device)
        return self

    def draw(self, device: torch.device) -> tuple[Tensor | float, Tensor | None]:
        """``(rate, clock)`` for an operator that drops by itself; ``(0.0, None)`` if nothing is dropped."""
        if not self.training or self.p == 0.0:
            return 0.0, None
        return self.rate, self.clock if self.clock.numel() else fresh_clock(device)

    def draw_fused(self, device: torch.device) -> tuple[Tensor | float, Tensor | None]:
        """The same for an operator that counts rows from 0; if rows are spread over ranks, see :meth:`drop_after`."""
        return self.draw(device) if self.reduce.ranks == 1 else (0.0, None)

    def drop_after(self, x: Tensor, parts: int = 1) -> Tensor:
        """``x [N, F]`` of an operator that was given :meth:`draw_fused`, dropped if that did not do it."""
        if self.reduce.ranks == 1:
            return x
        rate, clock = self.draw(x.device)
        return x if clock is None else dropout_rows(x, rate, clock, self.site, self.reduce.first_row, parts)

    def forward(self, x: Features) -> Features:
        """``x`` with some elements dropped and the others scaled up."""
        rate, clock = self.draw(x.device)
        if clock is None:
            return x
        if self.reduce.ranks > 1:
            if not isinstance(x, SparseFeatures):
                return self.drop_after(x)
            return DroppedFeatures(x.matrix, dropout_rows(x.values, rate, clock, self.site, x.matrix.first_edge))
        if isinstance(x, SparseFeatures):
            return DroppedFeatures(x.matrix, ops.dropout(x.values, rate, clock, self.site))
        return ops.dropout(x, rate, clock, self.site)

    def extra_repr(self) -> str:
        """The rate."""
        return f"p={self.p:g}"


def fresh_clock(device: torch.device) -> Tensor:
    """A clock ``[2]`` from torch's own generator."""
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)


def assign_sites(model: nn.Module) -> None:
    """Number the modules of ``model`` that draw masks, in the order of ``model.modules()``."""
    drawing = [module for module in model.modules() if isinstance(getattr(module, "clock", None), Tensor)]
    for site, module in enumerate(drawing):
        module.site = site


def next_mask(like: Tensor, p: float) -> tuple[float, Tensor, int]:
    """``(p, clock [2], site)`` of the next mask on the device of ``like``.

    A run counts the calls of dropout in one pass through a module, and draws each mask by (seed, step, number,
    element): its :class:`torch.overrides.TorchFunctionMode` answers here. Elsewhere torch's generator gives the clock.
    """
    if has_torch_function_unary(like):
        return handle_torch_function(next_mask, (like,), like, p)
    return p, fresh_clock(like.device), 0


class CallMask:
    """The dropout of a swapped attention layer for one call, in place of a :class:`Dropout`.

    PyG's attention calls ``F.dropout`` once; this requests one mask, so that all other masks keep their numbers.
    """

    def __init__(self, p: float, training: bool, like: Tensor) -> None:
        self._p, self._training, self._like = p, training, like
        self.site = 0

    def draw(self, device: object) -> tuple[float, Tensor | None]:
        """``(rate, clock)``, after which :attr:`site` is the mask's; ``(0.0, None)`` if nothing is dropped."""
        if not self._training or self._p == 0.0:
            return 0.0, None
        rate, clock, self.site = next_mask(self._like, self._p)
        return rate, clock
