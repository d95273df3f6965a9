"""State: every tensor that a training step changes, in fixed places so that a step can be replayed.

Shapes: P parameters, L epochs, M columns of history.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class State:
    """One task in training.

    ``flat [P]`` weights, ``moments`` of the optimizer ``[P]`` each, ``clock [2]`` int64 (seed, epochs done),
    ``buffers`` of the model (BatchNorm's statistics) by name, the best of both so far, ``best_score [1]``,
    ``best_epoch [1]`` (counted from 0, -1: none yet), ``end [1]`` (epochs that count: fewer than planned once
    training has stopped early) and ``history [L, M]``, NaN where nothing was measured.
    """

    flat: Tensor
    moments: tuple[Tensor, ...]
    clock: Tensor
    best_flat: Tensor
    best_score: Tensor
    best_epoch: Tensor
    end: Tensor
    history: Tensor
    buffers: dict[str, Tensor] = field(default_factory=dict)
    best_buffers: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def new(cls, flat: Tensor, buffers: dict[str, Tensor], moments: int, seed: int, epochs: int, columns: int) -> State:
        """The state before the first epoch, on the device of ``flat``; it takes ``buffers`` over."""
        device = flat.device
        return cls(
            flat=flat,
            moments=tuple(torch.zeros_like(flat) for _ in range(moments)),
            clock=torch.tensor([seed, 0], device=device),
            best_flat=flat.clone(),
            best_score=torch.full((1,), -torch.inf, device=device),
            best_epoch=torch.full((1,), -1, device=device),
            end=torch.full((1,), epochs, device=device),
            history=torch.full((epochs, columns), torch.nan, device=device),
            buffers=buffers,
            best_buffers={name: buffer.clone() for name, buffer in buffers.items()},
        )

    def __post_init__(self) -> None:
        self.step = self.clock[1:]  # epochs done [1], a view

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state by a name that is stable across versions of a checkpoint."""
        plain = ("flat", "clock", "best_flat", "best_score", "best_epoch", "end", "history")
        named = {name: getattr(self, name) for name in plain}
        named |= {f"moment.{index}": moment for index, moment in enumerate(self.moments)}
        named |= {f"buffer.{name}": buffer for name, buffer in self.buffers.items()}
        named |= {f"best_buffer.{name}": buffer for name, buffer in self.best_buffers.items()}
        return named

    def snapshot(self) -> dict[str, Tensor]:
        """A copy that :meth:`restore` takes back."""
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Copy ``saved`` into the places that this state already has."""
        for name, tensor in self.tensors().items():
            tensor.copy_(saved[name])
