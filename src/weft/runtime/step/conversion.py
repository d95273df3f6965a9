"""Try the layers of PyG in a stack's modules on Weft's operators, with a step of the first member, and convert them.

Shapes: P parameters, N nodes, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from weft.batches.source import Batch, Source
from weft.core.errors import SpecError
from weft.core.wording import option
from weft.runtime.device.process import same_draws
from weft.runtime.modules.convert import (
    OF_ALL,
    Conversion,
    Converted,
    Measures,
    Numbers,
    Trials,
    convertible,
    kept_over_batches,
    try_conversion,
    try_sparse,
)
from weft.runtime.step.forward import Forward, Loss
from weft.runtime.step.inputs import takes_edges
from weft.runtime.step.losses import as_one, of_member
from weft.runtime.step.members import Members, set_reduce
from weft.runtime.step.state import State
from weft.runtime.step.trial import EQUAL, NEAR, apart

OFF = 0.01  # how far the weights of other points are from the first ones, relative to each and to their mean size


def try_layers(members: Members, state: State, models: Sequence[nn.Module], loss: Loss) -> None:
    """Convert the layers of PyG in all modules if that changes no number of the first member's step, and note it.

    What is known, of a stack that was taken apart or of a run that is resumed, is not tried again.
    """
    if not members.converts or members.source.reduce.ranks > 1:
        return
    found = members.builder.inputs.converted
    if found is None:
        found = _Steps(members, state, loss).tried(models)
    else:
        check_known(members, models[0], found)
    members.convert(found, models)
    members.notes.extend([] if found.note is None else [found.note])


def check_known(members: Members, model: nn.Module, known: Converted) -> None:
    """A :class:`SpecError` unless the layers that were converted before can be in ``model``, too."""
    here = convertible(model, asked=members.task.convert is True)
    for name, kind in known.layers.items():
        if here.layers.get(name) != kind:
            there = f"there is a {here.layers[name]} now" if name in here.layers else "there is none now"
            raise _cannot_go_on(members, f"{kind} {name!r}" if name else kind, here.kept.get(name, there))
    if known.sparse and not members.builder.sparse:
        raise _cannot_go_on(members, "sparse features", f"those of graph {members.builder.graph.name!r} are dense now")


def _cannot_go_on(members: Members, what: str, why: str) -> SpecError:
    task = members.task
    return SpecError(
        f"task {task.label!r}: was trained with {what} of model {task.model_name} on Weft's operators, which cannot be "
        f"done again: {why}; resume with what it was trained with, or choose another {option('out')} to start afresh"
    )


class _Steps:
    """Steps of modules with the weights of the first member of ``state``, which stays as it is."""

    def __init__(self, members: Members, state: State, loss: Loss) -> None:
        self._members, self._state, self._loss = members, state, loss
        self._device = members.builder.inputs.device
        self._asked = members.task.convert is True

    def tried(self, models: Sequence[nn.Module]) -> Converted:
        """What to convert in ``models`` and the members' own."""
        members = self._members
        if self._device.type == "cuda" and not members.source.constant and not self._asked:
            return Converted(note=kept_over_batches(models[0]))
        trials = self._trials_on(members.source)
        found = try_conversion(models[0], trials, self._asked)
        if not isinstance(found, Conversion):
            return Converted(note=found)
        if members.builder.sparse and takes_edges(members.model) and members.source.constant:
            found = try_sparse(models[0], found, trials, self._trials_on(members.source_of(dense=False)))
        return found.decided

    def _trials_on(self, source: Source) -> Trials:
        batch, precision = source.example(), self._members.task.precision

        def given() -> Batch:
            # Training builds what operators need of a sampled batch in every step, so a trial must not find it built.
            return batch if source.constant else batch.without_derived()

        return Trials(
            self._members.builder.copied,
            lambda model, point: self.step(given(), model, point),
            Measures(self._errors, self._apart, EQUAL[precision], NEAR[precision], self._blind),
            exact=(lambda model, point: self._exact(batch, model, point)) if precision == "fp32" else None,
        )

    def step(self, batch: Batch, model: nn.Module, point: int) -> Numbers:
        """Losses ``[1]``, gradients ``[P]`` and logits ``[N, C]`` of a module; ``point``: 0, or weights nearby."""
        return self._numbers(batch, model, self._state_at(point))

    def _exact(self, batch: Batch, model: nn.Module, point: int) -> Numbers:
        """The same in float64, rounded at the end; raises if the module does not compute in it."""
        check_float32(model)
        if not has_room(self._device):
            raise torch.OutOfMemoryError("float64 takes twice the memory of the step before, which is not free")
        own = self._state_at(point)
        wide = own.of({name: _wide(tensor) for name, tensor in own.tensors().items()})
        return self._numbers(batch.in_float64(), model.double(), wide)

    def _state_at(self, point: int) -> State:
        own = self._state.select([0])
        if point:
            draw = torch.Generator().manual_seed(point)
            factors, shifts = (torch.randn(own.flat.shape, generator=draw).to(own.flat.device) for _ in range(2))
            own.flat.mul_(1.0 + OFF * factors).add_(OFF * own.flat.abs().mean() * shifts)
        return own

    def _numbers(self, batch: Batch, model: nn.Module, own: State) -> Numbers:
        forward = self._forward_of(model, own)
        before, slopes = own.snapshot(), torch.ones(1, dtype=own.flat.dtype, device=own.flat.device)
        with same_draws(self._device):
            losses, grad = forward.gradients(own.flat, batch, self._loss, slopes)
        own.restore(before)
        with torch.no_grad(), same_draws(self._device):
            output = forward(own.flat, training=False, batch=batch)
        if own.flat.dtype == torch.float64:
            check_float64(output)
        return losses.float(), grad[0], as_one(of_member(output, 0))

    def _forward_of(self, model: nn.Module, own: State) -> Forward:
        set_reduce(model, self._members.source.reduce)
        forward = self._members.forward_of(model, alone=True)
        forward.attach(own, [rate[None] for rate in self._members.slots[0].rates])
        return forward

    def _blind(self, true: Numbers) -> bool:
        return any(not bool(part.any()) for part in self._members.layout.views(true[1]))

    def _errors(self, mine: Numbers, true: Numbers) -> list[float]:
        return self._each(mine, true, OF_ALL)

    def _apart(self, mine: Numbers, true: Numbers) -> float:
        return max(self._each(mine, true))

    def _each(self, mine: Numbers, true: Numbers, *least: float) -> list[float]:
        layout = self._members.layout
        pairs = zip(layout.views(mine[1]), layout.views(true[1]), strict=True)
        parts = [apart(one, other, true[1], *least) for one, other in pairs]
        return [apart(mine[0], true[0]), apart(mine[2].float(), true[2].float()), *parts]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def check_float32(model: nn.Module) -> None:
    """A :class:`TypeError` for weights or buffers of another precision: in float64 they would be another module's."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype != torch.float32:
            raise TypeError(f"{name} is {tensor.dtype}")


def check_float64(output: object) -> None:
    """A :class:`TypeError` for an output of a lower precision: a type is written down somewhere in the module."""
    found = [one.dtype for one in pytree.tree_leaves(output) if isinstance(one, Tensor) and one.is_floating_point()]
    if any(dtype != torch.float64 for dtype in found):
        raise TypeError(f"the output is {found[0]}")


def has_room(device: torch.device) -> bool:
    """Whether a GPU has twice the memory free that the steps before have taken at most; others are not asked."""
    if device.type != "cuda":
        return True
    taken, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    most = torch.cuda.max_memory_allocated(device)
    return 2 * (most - taken) <= torch.cuda.mem_get_info(device)[0] + reserved - taken
