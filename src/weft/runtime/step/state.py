"""State: every tensor that a training step changes, in fixed places so that a step can be replayed.

Shapes: T members, P parameters, L epochs, M columns of history.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.core.compatibility import loop_parts
from weft.core.settings import PLATEAU, lower_is_better
from weft.core.task import Task

PLAIN = ("flat", "clock", "epoch", "epoch_loss", "best_flat", "best_score", "best_epoch", "end", "history")
RATE = "rate"  # what the rates of a table are multiplied by, [T]
GRADIENT_NORM = "gradient_norm"  # of the last step, [T], which callbacks may read
TOP = ("top_score", "top_epoch", "top_flat")  # of the best epochs, [T, k] and [T, k, P]; epoch -1: none yet
TOP_BUFFER = "top_buffer."  # before the names of their buffers, [T, k, ...]
FLAT = ("flat", "best_flat", "loop.ema", "loop.gradient")


def is_flat(name: str) -> bool:
    """Whether a tensor of the state has one number per parameter, in the places that the weights have."""
    return name in FLAT or name.startswith("moment.")


def buffer_called(name: str) -> str:
    """The buffer of the model that a tensor of the state is, or the best of it; empty if it is none."""
    kind, _, buffer = name.partition(".")
    return buffer if kind in ("buffer", "best_buffer") else ""


def copied_name(name: str) -> str:
    """The tensor of which tensor ``name`` of the state has one per kept epoch and member; empty if it has not."""
    buffer = name.removeprefix(f"loop.{TOP_BUFFER}")
    return "best_flat" if name == "loop.top_flat" else f"best_buffer.{buffer}" if buffer != name else ""


@dataclass
class State:
    """A stack of tasks in training, one row of every tensor per member.

    ``flat [T, P]`` weights, ``moments`` of the optimizer ``[T, P]`` each, ``clock [T, 2]`` int64 (seed, steps
    done), ``epoch [T]`` int64 epochs done, ``epoch_loss [T]`` the mean training loss over the steps of the epoch under
    way, ``buffers`` of the model (BatchNorm's statistics) by name, the best of both so far, ``best_score [T]``,
    ``best_epoch [T]`` (counted from 0, -1: none yet), ``end [T]`` (epochs that count: fewer than planned once
    training has stopped early) and ``history [T, L, M]``, NaN where nothing was measured. ``extras``: what some
    training loops keep besides, by name: averaged weights, gradients so far, factors of the rate. ``rowwise``: whether
    members may be at different steps, as trials are that begin in rows which others have left.
    """

    flat: Tensor
    moments: tuple[Tensor, ...]
    clock: Tensor
    epoch: Tensor
    epoch_loss: Tensor
    best_flat: Tensor
    best_score: Tensor
    best_epoch: Tensor
    end: Tensor
    history: Tensor
    buffers: dict[str, Tensor] = field(default_factory=dict)
    best_buffers: dict[str, Tensor] = field(default_factory=dict)
    extras: dict[str, Tensor] = field(default_factory=dict)
    rowwise: bool = False

    @classmethod
    def new(
        cls, tasks: Sequence[Task], flat: Tensor, buffers: dict[str, Tensor], columns: int, length: int = 0
    ) -> State:
        """The state of ``tasks`` before the first epoch, on the device of ``flat``; it takes ``buffers`` over.

        ``length``: rows of history, the most epochs unless given.
        """
        device, members, parts = flat.device, flat.shape[0], loop_parts(tasks[0])
        moments = 0 if tasks[0].has_own("optimizer") else 1 if tasks[0].optimizer == "sgd" else 2
        extras: dict[str, Tensor] = {}
        if "ema" in parts:
            extras["ema"] = flat.clone()
        if "accumulate" in parts:
            extras["gradient"] = torch.zeros_like(flat)
        if "plateau" in parts or "callbacks" in parts:
            extras[RATE] = torch.ones(members, dtype=torch.float64, device=device)
        if tasks[0].keep_top is not None:
            of_members = {"flat": flat, **{f"buffer.{name}": buffer for name, buffer in buffers.items()}}
            of_members |= {"score": torch.full_like(flat[:, 0], -torch.inf, dtype=torch.float32)}
            of_members |= {"epoch": torch.full((members,), -1, device=device)}
            extras |= {
                f"top_{name}": tensor[:, None].repeat_interleave(tasks[0].keep_top, 1)
                for name, tensor in of_members.items()
            }
        if "callbacks" in parts:
            extras[GRADIENT_NORM] = torch.zeros(members, dtype=flat.dtype, device=device)
        if "plateau" in parts:
            # The best value so far, evaluations without a better one, and cooling down.
            watched = [str((PLATEAU | task.plateau)["watch"]) for task in tasks]
            best = [torch.inf if lower_is_better(column) else -torch.inf for column in watched]
            extras["plateau_best"] = torch.tensor(best, dtype=torch.float64, device=device)
            extras["plateau_bad"] = torch.zeros(members, dtype=torch.int64, device=device)
            extras["plateau_cooldown"] = extras["plateau_bad"].clone()
        return cls(
            flat=flat,
            moments=tuple(torch.zeros_like(flat) for _ in range(moments)),
            clock=torch.tensor([[task.seed, 0] for task in tasks], device=device),
            epoch=torch.zeros(members, dtype=torch.int64, device=device),
            epoch_loss=torch.zeros(members, device=device),
            best_flat=flat.clone(),
            best_score=torch.full((members,), -torch.inf, device=device),
            best_epoch=torch.full((members,), -1, device=device),
            end=torch.tensor([task.epochs for task in tasks], device=device),
            history=torch.full(
                (members, length or max(task.epochs for task in tasks), columns), torch.nan, device=device
            ),
            buffers=buffers,
            best_buffers={name: buffer.clone() for name, buffer in buffers.items()},
            extras=extras,
        )

    def __post_init__(self) -> None:
        self.steps = self.clock[:, 1]  # steps done [T], a view; equal for all members unless rowwise
        self.step = self.clock[:1, 1]  # the same, [1]
        self.first_epoch = self.epoch[:1]  # epochs done, [1]

    @property
    def members(self) -> int:
        """T."""
        return self.flat.shape[0]

    def rows_of(self, table: Tensor) -> Tensor:
        """What ``table [T, S, ...]`` has for the step at hand of every member ``[T, 1, ...]``."""
        if not self.rowwise:
            return table.index_select(1, self.step)
        steps = self.steps.clamp(max=table.shape[1] - 1)  # a row may go on after its training has ended
        return table.gather(1, steps.view(-1, *(1,) * (table.dim() - 1)).expand(-1, 1, *table.shape[2:]))

    @property
    def idle(self) -> bool:
        """Whether no row is in training, each at an epoch of its own; reads the device."""
        return self.rowwise and bool((self.epoch >= self.end).all())

    @property
    def evaluated(self) -> Tensor:
        """The weights that are evaluated and kept ``[T, P]``: the averaged ones, if there are any."""
        return self.extras.get("ema", self.flat)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state by a name that is stable across versions of a checkpoint."""
        named = {name: getattr(self, name) for name in PLAIN}
        named |= {f"moment.{index}": moment for index, moment in enumerate(self.moments)}
        named |= {f"buffer.{name}": buffer for name, buffer in self.buffers.items()}
        named |= {f"best_buffer.{name}": buffer for name, buffer in self.best_buffers.items()}
        return named | {f"loop.{name}": tensor for name, tensor in self.extras.items()}

    def snapshot(self) -> dict[str, Tensor]:
        """A copy that :meth:`restore` takes back."""
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Copy ``saved`` into the places that this state already has."""
        for name, tensor in self.tensors().items():
            tensor.copy_(saved[name])

    def select(self, rows: Sequence[int]) -> State:
        """The state of some members alone, in new places."""
        if len(rows) == 1:
            tensors = {name: tensor[rows[0] : rows[0] + 1].clone() for name, tensor in self.tensors().items()}
        else:
            index = torch.tensor(list(rows), dtype=torch.int64, device=self.flat.device)
            tensors = {name: tensor.index_select(0, index) for name, tensor in self.tensors().items()}
        return self.of(tensors)

    def of(self, tensors: Mapping[str, Tensor]) -> State:
        """A state of ``tensors``, by the names of :meth:`tensors`."""
        return State(
            **{name: tensors[name] for name in PLAIN},
            moments=tuple(tensors[f"moment.{index}"] for index in range(len(self.moments))),
            buffers={name: tensors[f"buffer.{name}"] for name in self.buffers},
            best_buffers={name: tensors[f"best_buffer.{name}"] for name in self.best_buffers},
            extras={name: tensors[f"loop.{name}"] for name in self.extras},
            rowwise=self.rowwise,
        )


def write_row(into: object, row: int, of_one: object) -> None:
    """Copy the numbers of one member into the tensors that ``into`` has for all of them, attribute by attribute."""
    for name, tensor in vars(of_one).items():
        target = getattr(into, name)
        if isinstance(tensor, Tensor) and tensor.shape[:1] == (1,) and target.shape[1:] == tensor.shape[1:]:
            target[row].copy_(tensor[0])


@contextmanager
def restored(changed: Iterable[Tensor]) -> Iterator[None]:
    """Restore the tensors at the end."""
    saved = [(tensor, tensor.clone()) for tensor in changed]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in saved:
                tensor.copy_(value)
