"""Shared parts of the compiled CPU kernels: the decorator, pointers from addresses, rows split into equal shares.

Kernels take plain integers: addresses, sizes and flags. An address costs 0.2 us to read from a tensor, a
numpy view 2.5 us, and a step of training makes a dozen calls with eight arrays each. It also means one
compiled version for each floating type, whatever is optional in a call.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
from numba import njit
from numba.core import types
from numba.extending import intrinsic


@cache
def _sources_digest() -> str:
    """Digest of every file that goes into a kernel."""
    folder = Path(__file__).parent
    files = sorted([*folder.glob("*.py"), *(folder.parent / "sampling").glob("*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def kernel(function):
    """Compile on first use, without the GIL, and store the result on disk for the next process.

    Numba's own check covers only the file of the function and would miss a change in a module that it
    calls, so the stamp of the stored code is the digest of all of them. If neither the package's folder nor the user's
    cache can be written to, every process compiles for itself.
    """
    try:
        compiled = njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:
        return njit(nogil=True, error_model="numpy")(function)
    store = getattr(compiled, "_cache", None)
    cache_file = getattr(store, "_cache_file", None)
    if hasattr(cache_file, "_source_stamp"):
        cache_file._source_stamp = _sources_digest()
    if hasattr(store, "save_overload"):
        save = store.save_overload

        def save_unless_disk_is_full(*arguments):
            with suppress(OSError):
                save(*arguments)

        store.save_overload = save_unless_disk_is_full
    return compiled


part = njit(nogil=True, error_model="numpy", forceinline=True)  # a device function, compiled into its callers


def _to_pointer(kind):
    """Typing and code of a conversion from an address to a pointer to ``kind``."""
    result = types.CPointer(kind)

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(result))

    return result, generate


@intrinsic
def pointer(typing, address, like):
    """A pointer to numbers of the type of the array ``like`` at ``address``.

    Pointers rather than arrays: numba counts references to an array at every call, which costs more than a
    short row (cora, F = 16: 97 us with arrays, 44 us with pointers).
    """
    result, generate = _to_pointer(like.dtype)
    return result(types.int64, like), generate


@intrinsic
def shift(typing, array, count):
    """The pointer ``count`` numbers further on."""

    def generate(context, builder, signature, arguments):
        return builder.gep(arguments[0], [arguments[1]])

    return array(array, types.int64), generate


def _pointer_maker(kind):
    """An intrinsic ``f(address)`` that gives a pointer to numbers of one type."""

    @intrinsic
    def pointers(typing, address):
        result, generate = _to_pointer(kind)
        return result(types.int64), generate

    return pointers


int32s, uint8s, int64s, float32s = map(_pointer_maker, (types.int32, types.uint8, types.int64, types.float32))


@part
def first_row(indptr, num_rows, share, shares):
    """Where share ``share`` of ``shares`` begins, so that all hold about as many rows plus edges."""
    goal = (np.int64(indptr[num_rows]) + num_rows) * share // shares
    low, high = np.int64(0), np.int64(num_rows)
    while low < high:
        middle = (low + high) // 2
        if np.int64(indptr[middle]) + middle < goal:
            low = middle + 1
        else:
            high = middle
    return low


@part
def widest_row(indptr, first, last):
    """Largest degree of the rows ``first .. last``."""
    widest = np.int64(0)
    for row in range(first, last):
        widest = max(widest, np.int64(indptr[row + 1]) - np.int64(indptr[row]))
    return widest
