"""What a user's module keeps in Python between calls, as tensors of a checkpoint: numbers as JSON, tensors as they are.

Buffers are part of the training state anyway. This is for modules that count in an attribute, keep a tensor of the last
call, change a frozen parameter, or draw from Python's or NumPy's generator. Nothing is pickled.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.core.errors import SpecError
from weft.runtime.user_modules.attributes import attributes

TEXT, TENSOR = "python", "python."  # names in a checkpoint


def saved_state(model: nn.Module, changing: Collection[str]) -> dict[str, Tensor]:
    """The attributes of ``model`` and the states of both generators; ``changing``: names that have to be among them."""
    kind, keys, *rest = np.random.get_state()
    drawn = {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest]}
    return _packed(model, changing, attributes(model), {"generators": drawn})


def kept_attributes(model: nn.Module, changing: Collection[str]) -> dict[str, Tensor]:
    """What ``model`` keeps now under the names ``changing``, as far as it can be written down."""
    return _packed(model, changing, [(name, value) for name, value in attributes(model) if name in changing], {})


def cannot_keep(model: nn.Module, changing: Collection[str]) -> list[str]:
    """Those of the names that :func:`kept_attributes` leaves out: other objects than numbers, texts and tensors."""
    there = {name: value for name, value in attributes(model) if isinstance(value, Tensor) or _is_plain(value)}
    there |= dict(model.named_parameters())
    return [name for name in changing if name not in there]


def _packed(
    model: nn.Module, changing: Collection[str], found: Iterable[tuple[str, Any]], more: Mapping[str, Any]
) -> dict[str, Tensor]:
    numbers, tensors, lost = {}, {}, []
    for name, value in found:
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter):
                tensors[TENSOR + name] = value.detach().cpu().clone()
        elif _is_plain(value):
            numbers[name] = value
        elif name in changing:
            lost.append(name)
    frozen = {name: p for name, p in model.named_parameters() if name in changing}  # which it changes itself
    tensors |= {TENSOR + name: value.detach().cpu().clone() for name, value in frozen.items()}
    text = json.dumps({"attributes": numbers, "lost": lost, **more})
    return {TEXT: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), **tensors}


def restore_state(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """The inverse of :func:`saved_state`; a :class:`SpecError` if something could not be saved."""
    if TEXT not in saved:
        return
    found = json.loads(bytes(saved[TEXT].tolist()))
    if found["lost"]:
        raise SpecError(
            f"model {type(model).__name__} keeps {found['lost'][0]!r} between calls, which a checkpoint cannot hold, "
            "so its training cannot be resumed; make it a buffer, or start afresh with overwrite"
        )
    restore_attributes(model, saved)
    version, state, gauss = found["generators"]["python"]
    random.setstate((version, tuple(state), gauss))
    kind, keys, *rest = found["generators"]["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def restore_attributes(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """The inverse of :func:`kept_attributes`."""
    found = json.loads(bytes(saved[TEXT].tolist())) if TEXT in saved else {"attributes": {}}
    for name, value in found["attributes"].items():
        _assign(model, name, value)
    for name, value in saved.items():
        if name.startswith(TENSOR):
            _assign(model, name.removeprefix(TENSOR), value.clone())


def _assign(model: nn.Module, name: str, value: Any) -> None:
    """Set an attribute; in a container, the values: others may hold the container itself."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    old = vars(module).get(key)
    if key in module._parameters:
        module._parameters[key].data.copy_(value)
    elif isinstance(old, Tensor) or isinstance(value, Tensor):
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        vars(module)[key] = value.to(device)
    elif type(old) is dict and isinstance(value, dict):
        old.clear()
        old.update(value)
    elif type(old) is list and isinstance(value, list):
        old[:] = value
    else:
        vars(module)[key] = value


def _is_plain(value: Any) -> bool:
    """Whether JSON gives the same value back."""
    if value is None or isinstance(value, (bool, int, str)):
        return True
    if isinstance(value, float):
        return type(value) is float
    if type(value) is list:
        return all(map(_is_plain, value))
    return type(value) is dict and all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
