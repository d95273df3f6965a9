"""Sharing: values and memory that a module keeps in several places, so that they are one again when they come back."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from weft.runtime.user_modules.kept.shared_memory import storage


class Written(NamedTuple):
    """A value that is packed: the ``place`` it is in, as which ``tree``, and the ``label`` that others refer to."""

    place: str
    label: str
    tree: dict[str, Any]
    value: Any  # ids are unique among what lives


class Sharing:
    """What is packed so far of one module.

    ``pairs``: places with the earlier ones that they refer to, which must come back with them, and before them.
    """

    def __init__(self) -> None:
        self._values: dict[int, Written] = {}
        self._memory: dict[int, Written] = {}
        self.pairs: list[tuple[str, str]] = []

    def add(self, written: Written) -> None:
        """A value that a call has made."""
        self._values[id(written.value)] = written

    def find(self, value: Any, place: str) -> Written | None:
        """The same value in an earlier place, if there is one."""
        found = self._values.get(id(value))
        if found is not None:
            self.pairs.append((place, found.place))
        return found

    def share_memory(self, written: Written) -> None:
        """Note in the trees of two tensors that they are in one memory, with their parts of it."""
        tensor, start = written.value, storage(written.value)
        if not start or any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
            return
        first = self._memory.setdefault(start, written)
        if first.value is tensor or first.value.dtype != tensor.dtype:
            return
        for one in (first, written):
            one.tree["memory"] = {"label": first.label, **_part(one.value)}
        if first.place != written.place:
            self.pairs.append((written.place, first.place))


def _part(tensor: Tensor) -> dict[str, Any]:
    numbers = tensor.untyped_storage().nbytes() // tensor.element_size()
    return {"numbers": numbers, "view": [list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]}
