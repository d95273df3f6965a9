"""DevicePool: tensors carved out of one buffer of a device, which is allocated once.

Between groups nothing is allocated or freed there, so nothing fragments: clearing an owner gives its bytes back to the
buffer. Who clears an owner must hold no tensor of it any more.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from weft.sched.two_ended_pool import ALIGNMENT, HIGH, LOW, Place, TwoEndedPool

POISON = 0xFF  # NaN in every type of float


class DevicePool:
    """``capacity`` bytes of ``device``, the first ``reserved`` of them given to nobody.

    ``poison``: fill what is cleared with NaN, so that a tensor that outlives its owner is found out.
    """

    def __init__(self, device: torch.device, capacity: int, reserved: int = 0, poison: bool = False) -> None:
        self._whole = torch.empty(capacity + ALIGNMENT, dtype=torch.uint8, device=device)
        skipped = -self._whole.data_ptr() % ALIGNMENT
        self._bytes = self._whole[skipped : skipped + capacity]
        self._plan, self._poison = TwoEndedPool(capacity, reserved), poison
        self._tensors: dict[str, list[tuple[Place, Tensor]]] = {}
        self._lock = threading.RLock()  # a worker's second thread fetches into it

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._whole.device

    @property
    def capacity(self) -> int:
        """Its bytes."""
        return self._plan.capacity

    @property
    def free(self) -> int:
        """Bytes that nobody has."""
        return self._plan.free

    @property
    def storage(self) -> int:
        """The address of the one storage that all of its tensors share."""
        return self._whole.untyped_storage().data_ptr()

    def holes(self) -> list[tuple[int, int]]:
        """Its free parts."""
        return self._plan.holes()

    def owners(self) -> list[str]:
        """Everybody who has bytes of it."""
        return list(self._tensors)

    def held(self, owner: str) -> int:
        """Bytes of ``owner``."""
        return self._plan.held(owner)

    def carve(self, owner: str, shape: Sequence[int], dtype: torch.dtype, end: str = LOW) -> Tensor | None:
        """An uninitialised tensor at one end of the buffer; None if there is no room for it."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            place = self._plan.put(owner, size, end)
            if place is None:
                return None
            tensor = self._at(place.offset, shape, dtype)
            self._tensors.setdefault(owner, []).append((place, tensor))
            return tensor

    def _at(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Not a view, whose changes autograd would take for those of every other view of the buffer."""
        first = (self._bytes.storage_offset() + offset) // dtype.itemsize
        strides = torch.empty(tuple(shape), device="meta").stride()
        made = torch.empty(0, dtype=dtype, device=self.device)
        return made.set_(self._whole.untyped_storage(), first, tuple(shape), strides)

    def copy_in(self, owner: str, tensors: Mapping[str, Tensor], end: str = LOW) -> dict[str, Tensor] | None:
        """Copies of ``tensors`` on the current stream, all of them or none (None); from pinned memory they overlap."""
        with self._lock:
            places = {name: self.carve(owner, one.shape, one.dtype, end) for name, one in tensors.items()}
            found = {name: place for name, place in places.items() if place is not None}
            if len(found) < len(tensors):
                self.clear(owner)
                return None
        for name, place in found.items():
            place.copy_(tensors[name], non_blocking=True)
        return found

    def clear(self, owner: str) -> int:
        """Give back all bytes of ``owner``; how many."""
        with self._lock:
            for place, _ in self._tensors.pop(owner, []) if self._poison else ():
                self._bytes[place.offset : place.stop].fill_(POISON)
            self._tensors.pop(owner, None)
            return self._plan.clear(owner)

    def pack(self, owner: str) -> None:
        """Move what ``owner`` has as near to its end as it goes; its tensors are the same objects, elsewhere.

        For what nobody works on yet: weights that were fetched ahead, once the group before them has gone.
        """
        with self._lock:
            kept = [tensor for _, tensor in self._tensors.get(owner, [])]
            old = {place.offset: tensor for place, tensor in self._tensors.get(owner, [])}
            for move in self._plan.pack(owner):
                moved = self._bytes[move.source : move.source + move.size].clone()  # the places may overlap
                self._bytes[move.target : move.target + move.size].copy_(moved)
                tensor = old[move.source]
                tensor.set_(self._at(move.target, tensor.shape, tensor.dtype))
            by_address = {self._bytes.data_ptr() + place.offset: place for place in self._plan.places}
            self._tensors[owner] = [(by_address[tensor.data_ptr()], tensor) for tensor in kept]


__all__ = ["HIGH", "LOW", "DevicePool"]
