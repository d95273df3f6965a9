"""Copies of a member's model: the one that is given back after training, and the one that tries this out before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.batches.source import Batch
from weft.nn.pyg.convert import restore
from weft.runtime.device.process import DTYPES, same_draws
from weft.runtime.modules.copying import functions_that_hold
from weft.runtime.step.inputs import bind
from weft.runtime.step.losses import as_one
from weft.runtime.step.members import Members, MemberSlot, as_the_user_made_it
from weft.runtime.step.parameters import BufferSlots
from weft.runtime.step.state import State
from weft.runtime.step.trial import NEAR, apart

Buffers = dict[str, Tensor]


def model_of(members: Members, slot: MemberSlot, flat: Tensor, buffers: Buffers, state: State) -> nn.Module:
    """A member's model of its own with these padded weights, in evaluation mode, outside of any stack.

    Converted layers are PyG's again: it is the module that the user wrote.
    """
    model = _copy_of(members, slot, flat, buffers, state)
    restore(model)
    return model


def evaluated_by_copy(members: Members, state: State, batch: Batch) -> Any:
    """What a copy of the first member's module returns in evaluation mode."""
    buffers = {name: buffer[0] for name, buffer in state.buffers.items()}
    with torch.no_grad():
        return bind(_copy_of(members, members.slots[0], state.flat[0], buffers, state))(batch)


def _copy_of(members: Members, slot: MemberSlot, flat: Tensor, buffers: Buffers, state: State) -> nn.Module:
    device = members.builder.inputs.device
    if slot.task.traits is None and not members.rebuilds:
        own = {name: value.to(device) for name, value in buffers.items()}
        model, left_out = members.forward.copied(flat.to(device), slot.rates, own, state)
        _note_left_out(members, left_out)
        return as_the_user_made_it(model, slot.rates).eval()
    named = {name: value.to(device) for name, value in members.named(slot, flat, buffers).items()}
    model = _built_anew(members, slot)
    for name, parameter in model.named_parameters():
        if name in named:
            parameter.data = named[name].clone()
    BufferSlots(model).bind({name: named[name].clone() for name in buffers})
    return model.eval()


def _built_anew(members: Members, slot: MemberSlot) -> nn.Module:
    if slot.task.traits is not None:
        return members.builder.build(slot.task)
    with same_draws(members.builder.inputs.device):
        return members.builder.build_whole(slot.task)


def _note_left_out(members: Members, names: Sequence[str]) -> None:
    if names:
        members.builder.note_once(f"left out of the trained model, since they cannot be copied: {', '.join(names)}")


def try_copy(members: Members, state: State) -> None:
    """Copy a user's module as at the end of training, so that a failing copy is known before training.

    The copy is given other weights: one whose results do not follow them still holds the module's own somewhere.
    """
    task, slot = members.task, members.slots[0]
    flat, buffers = state.flat[0] * 1.5 + 0.01, {name: buffer[0] for name, buffer in state.buffers.items()}
    try:
        model = _copy_of(members, slot, flat, buffers, state)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise members.builder.cannot_copy(f"{type(error).__name__}: {error}") from error
    if members.hidden_state is not None and not isinstance(task.model, nn.Module):
        members.rebuilds = bool(functions_that_hold(members.model))
    if members.hidden_state is not None or DTYPES[task.precision] != torch.float32 or state.members > 1:
        return
    members.rebuilds = _differs(members, model, flat, state)
    if members.rebuilds and isinstance(task.model, nn.Module):
        raise members.builder.cannot_copy("a function that it keeps holds its parameters")


def _differs(members: Members, model: nn.Module, flat: Tensor, state: State) -> bool:
    """Whether a copy does not give what the shared model gives with the weights ``flat``."""
    batch = members.source.example()
    with torch.no_grad(), same_draws(members.builder.inputs.device), members.as_it_was():
        before = state.snapshot()
        state.flat[0] = flat
        expected = members.forward.one(state.flat[0], training=False, batch=batch)
        state.restore(before)
        return apart(as_one(bind(model)(batch)), as_one(expected)) > NEAR["tf32"]
