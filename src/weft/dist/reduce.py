"""Reduce over ranks: sums and concatenations of rows that are spread over processes.

A sum gathers every rank's part and adds them in the order of the ranks, so that it has the same bits on every rank and
in every run, whatever the transport does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from weft.dist.ranks import Gathered, Ranks


class RankReduce:
    """A :class:`weft.ops.reduce.Reduce` over torch.distributed; this rank has ``rows`` rows from ``first_row`` on."""

    def __init__(self, ranks: Ranks, first_row: int, rows: int) -> None:
        self._ranks, self.ranks, self.first_row, self.rows = ranks, ranks.ranks, first_row, rows

    def sum(self, value: Tensor) -> Tensor:
        """The sum of every rank's ``value``, differentiable."""
        return _Sum.apply(value, self._ranks)

    def start_sum(self, value: Tensor) -> RankSum:
        """Send ``value``; the sum over ranks is taken once it is waited for. Not differentiable."""
        return RankSum(self._ranks.start_gather(value))

    def gather(self, rows: Tensor, dim: int) -> Tensor:
        """Every rank's ``rows`` concatenated along ``dim``; they may differ in number."""
        dim %= rows.dim()
        counts = self._ranks.all_gather(torch.tensor([rows.shape[dim]]))
        sizes = [int(count) for count in counts]
        most = max(sizes)
        if rows.shape[dim] < most:
            shape = list(rows.shape)
            shape[dim] = most - rows.shape[dim]
            rows = torch.cat([rows.detach(), rows.new_zeros(shape)], dim)
        parts = self._ranks.all_gather(rows)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)


def _in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of the ranks' parts, in the order of the ranks."""
    total, *rest = parts
    for part in rest:
        total = total + part
    return total


class RankSum:
    """A sum that is under way."""

    def __init__(self, gathered: Gathered) -> None:
        self._gathered = gathered

    def wait(self) -> Tensor:
        """The sum, in the order of the ranks."""
        return _in_order(self._gathered.wait())


class _Sum(torch.autograd.Function):
    """``y = sum over ranks of x``; what the ranks compute from y adds up, so gradients are summed in turn."""

    @staticmethod
    def forward(value: Tensor, ranks: Ranks) -> Tensor:
        return _in_order(ranks.all_gather(value))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.ranks = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Sum.apply(grad, ctx.ranks), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], value: Tensor, ranks: Ranks) -> tuple[Tensor, int]:
        return _Sum.apply(value.movedim(in_dims[0], 0), ranks), 0


class SumStarted(Protocol):
    """A sum over ranks that is under way."""

    def wait(self) -> Tensor:
        """The sum, once every rank's part is here."""


class StartsSums(Protocol):
    """Starts sums over ranks; all ranks start the same ones in the same order."""

    def start_sum(self, value: Tensor) -> SumStarted:
        """Send ``value`` without waiting."""


class EarlyGradients:
    """Sum the gradients of one backward pass over ranks while the pass is still running.

    The gradients of all layers but the first are known before the first layer's backward aggregation, the last exchange
    of a step. They are sent then, and the sum is taken when the pass has ended: the transfer overlaps with that
    aggregation. The rest, with the losses, follows at the end. Sums have one order, so the bits are those of one sum of
    everything.

    ``sizes`` of the parameters; ``late``: of each, whether it belongs to the first layer.
    Shapes: T members, P parameters.
    """

    def __init__(self, sizes: Sequence[int], members: int, late: Sequence[bool], reduce: StartsSums) -> None:
        self._members, self._sizes, self._reduce = members, list(sizes), reduce
        self._early = [index for index, is_late in enumerate(late) if not is_late]
        self._late = [index for index, is_late in enumerate(late) if is_late]
        self._gradients: dict[int, Tensor] = {}
        self._waiting = set(self._early)
        self._sum: SumStarted | None = None

    def take(self, index: int, gradient: Tensor) -> None:
        """The gradient of a parameter is complete, for all members."""
        if index in self._waiting:
            self._gradients[index] = gradient.detach()
            self._waiting.discard(index)
            if not self._waiting:
                self._sum = self._reduce.start_sum(self._joined(self._gradients[early] for early in self._early))
                self._gradients.clear()

    def _joined(self, parts: Iterable[Tensor]) -> Tensor:
        return torch.cat([part.reshape(self._members, -1).float() for part in parts], 1)

    def finish(self, losses: Tensor, grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Losses ``[T]`` and gradients ``[T, P]``, summed over ranks; ``grads``: per parameter, what this rank has."""
        early, late = self._early, self._late
        if early and self._sum is None:  # some parameter got no gradient: it has zeros
            self._sum = self._reduce.start_sum(self._joined(grads[index] for index in early))
        rest = torch.cat([losses[:, None], *([self._joined(grads[index] for index in late)] if late else [])], 1)
        summed = self._reduce.start_sum(rest).wait()
        gradients = dict(zip(late, summed[:, 1:].split([self._sizes[index] for index in late], 1), strict=True))
        if self._sum is not None:
            parts = self._sum.wait().split([self._sizes[index] for index in early], 1)
            gradients |= dict(zip(early, parts, strict=True))
        return summed[:, 0], torch.cat([gradients[index] for index in range(len(self._sizes))], 1)
