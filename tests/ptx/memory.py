"""Memory of an imagined GPU: copies of storages with gaps between them; an access outside of them is a Fault."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BASE = 1 << 40  # addresses begin here: a null pointer and small numbers are outside
GAP = 4096


class Fault(Exception):
    """What a GPU would refuse, or compute nonsense from."""


class Memory:
    """The storages of tensors; :meth:`load` copies them in, :meth:`store` copies them back."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}  # by storage
        self._parts: list[tuple[int, int, Tensor]] = []
        self._end = GAP

    def address(self, tensor: Tensor) -> int:
        """Where ``tensor`` begins; 0 without elements, as on a GPU."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return 0
        if storage._cdata not in self._places:
            self._places[storage._cdata] = self._end
            self._parts.append((self._end, storage.nbytes(), tensor))
            self._end += -(-storage.nbytes() // 512) * 512 + GAP
        return BASE + self._places[storage._cdata] + tensor.storage_offset() * tensor.element_size()

    def load(self) -> None:
        """Copy every storage in; the gaps are full of ones, which is NaN for a float."""
        self._bytes = np.full(self._end + GAP, 0xFF, np.uint8)
        self._inside = np.zeros(self._end + GAP, bool)
        for begin, size, tensor in self._parts:
            self._bytes[begin : begin + size] = _raw(tensor)
            self._inside[begin : begin + size] = True

    def store(self) -> None:
        """Copy every storage back."""
        for begin, size, tensor in self._parts:
            _raw(tensor)[:] = self._bytes[begin : begin + size]

    def check(self, address: np.ndarray, size: int, mask: np.ndarray) -> None:
        """A Fault unless ``size`` bytes at each address lie inside one storage, aligned to their size."""
        offset = address[mask].astype(np.int64) - BASE
        if not offset.size:
            return
        if offset.min() < 0 or offset.max() + size > self._inside.size:
            raise Fault(f"address {offset.min() + BASE:#x} to {offset.max() + BASE:#x} is outside of all memory")
        outside = ~(self._inside[offset] & self._inside[offset + size - 1])
        if outside.any():
            raise Fault(f"{outside.sum()} threads are outside: {self._near(int(offset[outside][0]))}")
        if (offset % size).any():
            raise Fault(f"an address is not a multiple of {size}")

    def _near(self, offset: int) -> str:
        for begin, size, tensor in self._parts:
            if begin - GAP // 2 <= offset < begin + size + GAP // 2:
                return f"byte {offset - begin} of the {size} of a tensor {tuple(tensor.shape)} {tensor.dtype}"
        return "no tensor is near"

    def get(self, address: np.ndarray, dtype: type, mask: np.ndarray) -> np.ndarray:
        """Values at the addresses of the threads in ``mask``; zeros elsewhere."""
        out = np.zeros(mask.size, dtype)
        offset = address[mask].astype(np.int64) - BASE
        out[mask] = self._bytes[offset[:, None] + np.arange(out.itemsize)].copy().view(dtype)[:, 0]
        return out

    def put(self, address: np.ndarray, value: np.ndarray, mask: np.ndarray) -> None:
        """Write the values of the threads in ``mask``."""
        offset = address[mask].astype(np.int64) - BASE
        chosen = np.ascontiguousarray(value[mask])
        self._bytes[offset[:, None] + np.arange(chosen.itemsize)] = chosen.view(np.uint8).reshape(-1, chosen.itemsize)


def _raw(tensor: Tensor) -> np.ndarray:
    return torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
