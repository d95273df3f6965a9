"""Store one tensor in one .npy file: written in blocks, memory-mapped on reading."""

from __future__ import annotations

import math
import mmap
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.graph.data.arrays import dtype_name

BLOCK_BYTES = 2**26
# numpy has no bfloat16: its bits are kept as int16.
NUMPY_TYPES = {
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<i2",
    "float64": "<f8",
    "int32": "<i4",
    "int64": "<i8",
}


@dataclass(frozen=True)
class ArraySpec:
    """Type and shape of a stored tensor, as the description of the graph keeps them."""

    dtype: str
    shape: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "shape": list(self.shape)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ArraySpec:
        """The inverse of :meth:`to_dict`."""
        return cls(data["dtype"], tuple(data["shape"]))

    @property
    def numpy(self) -> np.dtype:
        """The numpy type of the file."""
        return np.dtype(NUMPY_TYPES[self.dtype])

    @property
    def nbytes(self) -> int:
        """Bytes of the values alone."""
        return math.prod(self.shape) * self.numpy.itemsize


def write_array(path: Path, tensor: Tensor, flush: bool = True) -> ArraySpec:
    """Write a tensor of any device; no more than a block of it is copied at a time.

    ``flush`` puts it on the disk before this returns, for files that must survive a power cut.
    """
    spec = ArraySpec(dtype_name(tensor.dtype), tuple(tensor.shape))
    bits = tensor.detach().view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor.detach()
    header = {"descr": spec.numpy.str, "fortran_order": False, "shape": spec.shape}
    flat = bits.reshape(-1)
    step = BLOCK_BYTES // spec.numpy.itemsize
    with path.open("wb") as file:
        np.lib.format.write_array_header_2_0(file, header)
        for start in range(0, flat.numel(), step):
            block = flat[start : start + step].cpu().numpy().astype(spec.numpy, copy=False)
            file.write(memoryview(block).cast("B"))
        file.flush()
        if flush:
            os.fsync(file.fileno())
    return spec


def map_array(path: Path, spec: ArraySpec) -> Tensor:
    """The tensor of a file, mapped: nothing is read but its header, and writes stay private."""
    if not path.is_file():
        raise GraphError(f"{path} is missing; the saved graph is incomplete, save it again")
    start = _check_header(path, spec)
    size, expected = path.stat().st_size, start + spec.nbytes
    if size != expected:
        raise GraphError(
            f"{path} holds {size} bytes but {expected} were expected for {spec.dtype} {list(spec.shape)}; "
            f"the file is {'truncated' if size < expected else 'not the one that was saved'}, save it again"
        )
    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    values = np.frombuffer(_map_private(path), dtype=spec.numpy, offset=start)
    tensor = torch.from_numpy(values).view(spec.shape)
    return tensor.view(torch.bfloat16) if spec.dtype == "bfloat16" else tensor


def _check_header(path: Path, spec: ArraySpec) -> int:
    """Compare the file's own header with the spec; where the values start."""
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(file)
            start = file.tell()
    except ValueError as error:
        raise GraphError(
            f"{path} ({path.stat().st_size} bytes, {spec.nbytes} bytes of values expected) has no readable "
            f"header: {error}; save the graph again"
        ) from None
    if (shape, fortran, dtype) != (spec.shape, False, spec.numpy):
        raise GraphError(
            f"{path} holds {dtype} {list(shape)} but {spec.dtype} {list(spec.shape)} was saved; save it again"
        )
    return start


def _map_private(path: Path) -> mmap.mmap:
    """The file mapped copy-on-write, so that torch may call it writable."""
    with path.open("rb") as file:
        if sys.platform != "linux":
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        # Linux counts a private writable mapping against free memory and refuses one larger than that,
        # unless a flag says that no page of it needs a reserve. The constant has its name from Python 3.13 on.
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
        return mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
