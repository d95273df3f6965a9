"""Buffers that a module replaces instead of updating are copied back, per member."""

from __future__ import annotations

import torch
from torch import nn

from weft.runtime.step.forward import BufferSlots, take_buffers


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("same", self.calls)

    def forward(self):
        self.calls = self.calls + 1


def test_a_replaced_buffer_is_copied_into_its_place():
    model = Counting()
    slots, own = BufferSlots(model), take_buffers(model)
    assert list(own) == ["calls"]
    slots.bind(own)
    for count in (1.0, 2.0):
        model()
        slots.collect(own)
        assert own["calls"].item() == count
        assert model.calls is own["calls"]
        assert model.same is own["calls"]
