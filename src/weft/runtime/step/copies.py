"""Copies of a member's model: the one that a result has, and the one that is called before training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.batches.source import Batch
from weft.nn.pyg.convert import restore
from weft.runtime.device.process import same_draws
from weft.runtime.step.inputs import bind
from weft.runtime.step.members import Members, MemberSlot, as_the_user_made_it
from weft.runtime.step.parameters import BufferSlots
from weft.runtime.step.state import State

Buffers = dict[str, Tensor]


def model_of(members: Members, slot: MemberSlot, flat: Tensor, buffers: Buffers, state: State) -> nn.Module:
    """A member's model of its own with these padded weights, in evaluation mode, outside of any stack.

    Converted layers are PyG's again: it is the module that the user wrote.
    """
    model = copy_of(members, slot, flat, buffers, state)
    restore(model)
    return model


def evaluated_by_copy(members: Members, state: State, batch: Batch) -> Any:
    """What a copy of the first member's module returns in evaluation mode."""
    buffers = {name: buffer[0] for name, buffer in state.buffers.items()}
    with torch.no_grad():
        return bind(copy_of(members, members.slots[0], state.flat[0], buffers, state))(batch)


def copy_of(members: Members, slot: MemberSlot, flat: Tensor, buffers: Buffers, state: State) -> nn.Module:
    """As :func:`model_of`, with converted layers as they are."""
    builder = members.builder
    device = builder.inputs.device
    if slot.task.traits is None and not members.rebuilds:
        on_device = {name: value.to(device) for name, value in buffers.items()}
        model, left_out = members.forward.copied(flat.to(device), slot.rates, on_device, state)
        if left_out:
            builder.note_once(f"left out of the trained model, since they cannot be copied: {', '.join(left_out)}")
        return as_the_user_made_it(model, slot.rates).eval()
    named = {name: value.to(device) for name, value in members.named(slot, flat, buffers).items()}
    if slot.task.traits is not None:
        model = builder.build(slot.task)
    else:
        with same_draws(device):
            model = builder.build_whole(slot.task)
    for name, parameter in model.named_parameters():
        if name in named:
            parameter.data = named[name].clone()
    BufferSlots(model).bind({name: named[name].clone() for name in buffers})
    return model.eval()
