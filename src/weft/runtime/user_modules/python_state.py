"""What a user's module keeps in Python between calls, as tensors of a file: a text of JSON, and tensors as they are.

Buffers are part of the training state anyway. This is for modules that count in an attribute, keep a tensor of the last
call, change a frozen parameter, or draw from Python's or NumPy's generator. Nothing is pickled.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.core.errors import SpecError
from weft.runtime.user_modules.kept.packing import Packed
from weft.runtime.user_modules.kept.state import Snapshot, give_back

TEXT, TENSOR = "python", "python."  # names in a file


def as_tensors(snapshot: Snapshot, more: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """What a module keeps, for a file; empty if it keeps nothing and there is no ``more`` to say."""
    whole = {name: packed for name, packed in snapshot.items() if packed.whole}
    lost = [name for name in snapshot if name not in whole]
    if not snapshot and not more:
        return {}
    found = {f"{TENSOR}{n}.{at}": one.cpu().clone() for n, p in whole.items() for at, one in enumerate(p.tensors)}
    trees = {name: one.tree for name, one in whole.items()}
    needed = [name for name in lost if snapshot[name].tree.get("needed")]
    text = json.dumps({"attributes": trees, "lost": lost, "needed": needed, **(more or {})})
    return {TEXT: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), **found}


def from_tensors(saved: Mapping[str, Tensor]) -> Snapshot:
    """The inverse of :func:`as_tensors`."""
    trees = _text(saved).get("attributes", {})
    found = {name: Packed(tree, _tensors_of(name, saved)) for name, tree in trees.items()}
    plain = [name for name in saved if name.startswith(TENSOR) and name not in _named(found)]
    return found | {name.removeprefix(TENSOR): as_kept(saved[name]) for name in plain}  # as files had them before


def _named(found: Snapshot) -> set[str]:
    return {f"{TENSOR}{name}.{at}" for name, packed in found.items() for at in range(len(packed.tensors))}


def as_kept(value: Tensor) -> Packed:
    """A tensor that takes the place of another one, or of None."""
    about = {"parameter": False, "grad": False, "host": False}
    return Packed({"is": "tensor", "at": 0, **about}, (value.detach().clone(),))


def _tensors_of(name: str, saved: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    found = []
    while f"{TENSOR}{name}.{len(found)}" in saved:
        found.append(saved[f"{TENSOR}{name}.{len(found)}"])
    return tuple(found)


def _text(saved: Mapping[str, Tensor]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(saved[TEXT].tolist())) if TEXT in saved else {}
    return found


def saved_state(snapshot: Snapshot) -> dict[str, Tensor]:
    """What a module keeps and the states of both generators, for a checkpoint."""
    kind, keys, *rest = np.random.get_state()
    drawn = {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest]}
    return as_tensors(snapshot, {"generators": drawn})


def check_whole(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """A :class:`SpecError` if something could not be saved."""
    lost = _text(saved).get("lost")
    if lost:
        raise SpecError(
            f"model {type(model).__name__} keeps {lost[0]!r} between calls, which a checkpoint cannot hold, "
            "so its training cannot be resumed; make it a buffer, or start afresh with overwrite"
        )


def check_enough(label: str, model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """A :class:`SpecError` if evaluations read something that could not be saved."""
    needed = _text(saved).get("needed")
    if needed:
        raise SpecError(
            f"task {label!r}: model {type(model).__name__} keeps {needed[0]!r} between calls, which no file can hold, "
            "and its predictions depend on it: predict in the process that trained it, or keep it in a buffer"
        )


def restore_generators(saved: Mapping[str, Tensor]) -> None:
    """Continue Python's and NumPy's generators as :func:`saved_state` found them."""
    drawn = _text(saved).get("generators")
    if drawn is None:
        return
    version, state, gauss = drawn["python"]
    random.setstate((version, tuple(state), gauss))
    kind, keys, *rest = drawn["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def restore_attributes(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Give ``model`` what a file has of what it kept."""
    give_back(model, from_tensors(saved))
