"""Convert users' arrays to tensors and check them. Each check raises one GraphError: value, position, what to do.

Arrays that already have the type a graph uses are shared, never copied, so a memory-mapped feature file stays one.

Large arrays are scanned in blocks, so a check never holds a mask as large as the array. Shapes: N nodes, E edges.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cache
from numbers import Integral
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


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` rather than ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


BLOCK = 2**24
MAX_NODES = 2**31 - 1
MOST_CLASSES = 2**16  # of a graph with fewer than half as many nodes


def blocks(length: int, block: int = BLOCK) -> Iterator[slice]:
    """Consecutive slices that cover ``range(length)``."""
    for start in range(0, length, block):
        yield slice(start, min(start + block, length))


def first_where(values: Tensor, bad: Callable[[Tensor], Tensor]) -> int | None:
    """Flat position of the first element that ``bad`` marks, or None."""
    flat = values.reshape(-1)
    for part in blocks(flat.numel()):
        marks = bad(flat[part])
        if marks.any():
            return part.start + int(marks.nonzero()[0])
    return None


def all_between(values: Tensor, low: int, high: int) -> bool:
    """Whether no value is below ``low`` or above ``high``: one pass that writes nothing."""
    flat = values.reshape(-1)
    ends = (torch.aminmax(flat[part]) for part in blocks(flat.numel()))
    return all(int(least) >= low and int(most) <= high for least, most in ends)


def position_in(shape: torch.Size, flat: int) -> str:
    """The flat position as an index: ``[12]`` or ``[3, 5]``."""
    index = []
    for size in reversed(shape):
        index.append(flat % size)
        flat //= size
    return str(list(reversed(index)))


def check_num_nodes(num_nodes: int) -> None:
    """A whole number, at least one, and few enough for 32-bit ids."""
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, Integral):
        raise GraphError(f"num_nodes={num_nodes!r} must be a whole number")
    if num_nodes < 1:
        raise GraphError(f"num_nodes={num_nodes}: a graph needs at least 1 node (it may have 0 edges)")
    if num_nodes > MAX_NODES:
        raise GraphError(f"num_nodes={num_nodes} is more than 2^31 - 1; node ids are kept in 32 bits")


def check_range(ids: Tensor, limit: int, name: str, what: str = "node ids") -> None:
    """Every id lies in ``0 .. limit - 1``."""
    if all_between(ids, 0, limit - 1):
        return
    bad = first_where(ids, lambda part: (part < 0) | (part >= limit))
    if bad is not None:
        value = ids[bad].item()
        advice = "" if what != "node ids" else "; renumber the nodes" + (" or give a larger num_nodes" * (value >= 0))
        raise GraphError(f"{name}[{bad}] = {value} is out of range: {what} must lie in 0..{limit - 1}{advice}")


def check_rows(rows: int, expected: int, name: str, per: str) -> None:
    """An array has one row per node, or per edge."""
    if rows != expected:
        raise GraphError(f"{name} has {rows} rows but the graph has {expected} {per}s; give one row per {per}")


def check_rows_for_ids(name: str, rows: int, **ends: Any) -> None:
    """The array that says how many nodes there are has a row for every node that an edge names."""
    for end, values in ends.items():
        ids = as_ids(values, end)
        most = int(ids.max()) if ids.numel() else -1
        if most >= rows:
            raise GraphError(
                f"{name} has {rows} rows, but {end}[{int(ids.argmax())}] = {most} names a node beyond them; give one "
                "row per node"
            )


def check_finite(values: Tensor, name: str) -> None:
    """No NaN, no infinity."""
    bad = first_where(values, lambda part: ~torch.isfinite(part))
    if bad is not None:
        raise not_finite(f"{name}{position_in(values.shape, bad)}", values.reshape(-1)[bad])


def not_finite(element: str, value: Tensor) -> GraphError:
    """The error for a NaN or an infinity."""
    kind = dtype_name(value.dtype)
    return GraphError(f"{element} is {value.item()}: values must be finite in {kind}; replace or drop it first")


def check_labels(y: Tensor) -> None:
    """Class numbers from 0 (``-1`` for unlabelled), or 0/1 rows for several labels."""
    if y.dim() == 2:
        bad = first_where(y, lambda part: (part != 0) & (part != 1))
        if bad is not None:
            raise GraphError(
                f"y{position_in(y.shape, bad)} = {y.reshape(-1)[bad].item()}: a label matrix [N, C] holds "
                "0 or 1; for one class per node give a vector of class numbers, and scale numbers to predict if all "
                "of them are whole"
            )
        return
    bad = first_where(y, lambda part: part < -1)
    if bad is not None:
        raise GraphError(
            f"y[{bad}] = {y[bad].item()} is negative: classes are 0, 1, 2, ... and -1 marks a node without a label"
        )
    limit = max(MOST_CLASSES, 2 * y.numel())
    bad = first_where(y, lambda part: part >= limit)
    if bad is not None:
        raise GraphError(
            f"y[{bad}] = {y[bad].item()} would make {y[bad].item() + 1:,} classes for {y.numel():,} nodes; number the "
            "classes 0, 1, 2, ..."
        )


def check_labelled(y: Tensor, ids: Tensor, name: str) -> None:
    """No node of a split is unlabelled."""
    if ids.numel() == 0:
        return
    bad = first_where(ids, lambda part: lacks_number(y[part]) if y.is_floating_point() else y[part] < 0)
    if bad is not None:
        raise GraphError(
            f"node {int(ids[bad])} of the {name} split has no label (y = {y[ids[bad]].tolist()}): "
            f"label it or take it out of the split"
        )


def lacks_number(y: Tensor) -> Tensor:
    """Which rows of numbers to predict have a NaN ``[N]``."""
    return y.isnan() if y.dim() == 1 else y.isnan().any(-1)


def check_offsets(indptr: Tensor, num_entries: int, name: str = "indptr") -> None:
    """Row offsets start at 0, never fall, and end at the number of entries."""
    if indptr.numel() < 2:
        raise GraphError(f"{name} has {indptr.numel()} entries; give one per row and one more")
    if int(indptr[0]) != 0:
        raise GraphError(f"{name}[0] = {int(indptr[0])}: row offsets start at 0")
    if int(indptr[-1]) != num_entries:
        raise GraphError(
            f"{name}[{indptr.numel() - 1}] = {int(indptr[-1])} but there are {num_entries} entries: "
            f"the last row offset must equal their number"
        )
    bad = first_where(indptr.diff(), lambda part: part < 0)
    if bad is not None:
        raise GraphError(
            f"{name}[{bad + 1}] = {int(indptr[bad + 1])} is less than {name}[{bad}]: offsets must not decrease"
        )


def check_ascending(indptr: Tensor, indices: Tensor, name: str = "indices", *, strictly: bool = False) -> None:
    """Column ids ascend within every row."""
    for part in blocks(indices.numel() - 1):
        previous, following = indices[part], indices[part.start + 1 : part.stop + 1]
        falls = ((following <= previous) if strictly else (following < previous)).nonzero().squeeze(1) + part.start + 1
        # A fall is allowed exactly where a new row begins.
        slot = torch.searchsorted(indptr, falls.to(indptr.dtype))
        inside = falls[indptr[slot] != falls]
        if inside.numel():
            bad = int(inside[0])
            raise GraphError(
                f"{name}[{bad}] = {int(indices[bad])} follows {int(indices[bad - 1])} in the same row: "
                f"ids must ascend within a row; Graph.from_edges sorts them for you"
            )
