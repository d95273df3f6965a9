"""Convert users' arrays to tensors of the types a graph keeps.

Arrays that already have that type are shared, never copied, so a memory-mapped feature file stays one.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import GraphError

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def as_tensor(value: Any, name: str) -> Tensor:
    """Torch tensors as they are (detached); lists, numpy arrays, pandas columns through numpy."""
    if isinstance(value, Tensor):
        return value.detach()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise GraphError(f"{name} is not a rectangular array ({error}); make its rows equally long") from None
    if array.dtype.kind not in "buif":
        sample = f", for example {array.reshape(-1)[0]!r}" if array.size else ""
        raise GraphError(f"{name} has dtype {array.dtype}{sample}; give an array of numbers")
    return _from_numpy(array)


def _from_numpy(array: np.ndarray) -> Tensor:
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(stride < 0 for stride in array.strides):
        array = array.copy()
    with warnings.catch_warnings():
        # A read-only array is fine: a graph never writes to what it was given.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def as_vector(value: Any, name: str) -> Tensor:
    """A one-dimensional tensor."""
    tensor = as_tensor(value, name)
    if tensor.dim() != 1:
        raise GraphError(f"{name} has shape {list(tensor.shape)}; give one value per entry, a vector")
    return tensor


def as_ids(value: Any, name: str) -> Tensor:
    """A vector of int32 or int64: node ids, column ids, relation numbers."""
    tensor = as_vector(value, name)
    if tensor.numel() == 0:
        return tensor.to(torch.int64)
    if tensor.dtype in INTEGERS:
        # Narrower types would wrap where they are compared with a number of nodes.
        return tensor if tensor.dtype in (torch.int32, torch.int64) else tensor.to(torch.int32)
    position = 0
    if tensor.is_floating_point():
        fractional = (tensor != tensor.floor()).nonzero()
        position = int(fractional[0]) if fractional.numel() else 0
    raise GraphError(
        f"{name}[{position}] = {tensor[position].item()} is of type {dtype_name(tensor.dtype)}; "
        f"ids must be integers: renumber the nodes 0, 1, 2, ... and give an integer array"
    )


def as_floats(tensor: Tensor, name: str) -> Tensor:
    """Half precision and float32 as they are; float64, integers and booleans as float32."""
    if tensor.is_complex():
        raise GraphError(f"{name} has dtype {dtype_name(tensor.dtype)}; give real numbers")
    return tensor if tensor.dtype in FLOATS else tensor.to(torch.float32)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` rather than ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
