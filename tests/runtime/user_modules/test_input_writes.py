"""InputWrites: what a module changes of its inputs, whichever way, and nothing else."""

from __future__ import annotations

import pytest
import torch

from weft.runtime.user_modules.input_writes import InputWrites


@pytest.mark.parametrize(("touch", "changed"), [
    (lambda x: x + 1, []),
    (lambda x: x.data, []),
    (lambda x: x.numpy(), []),
    (lambda x: x.add_(1), ["x"]),
    (lambda x: x.data.add_(1), ["x"]),
    (lambda x: x.numpy().__setitem__(0, 5), ["x"]),
    (lambda x: setattr(x, "data", x[:1].clone()), ["x"]),
    (lambda x: x[1:].data.add_(1), ["x"]),
    (lambda x: x[:2].numpy().__setitem__(0, 5), ["x"]),
    (lambda x: x[:2].numpy(), []),
    (lambda x: x.clone().data.add_(1), []),
])  # fmt: skip
def test_changes_are_named(touch, changed):
    x, other = torch.tensor([1.0, float("nan"), 3.0]), torch.arange(3)
    watch = InputWrites({"x": x, "other": other})
    with watch:
        touch(x)
    assert watch.changed() == changed
