"""cuSPARSE's SpMM as its documentation wants it used: descriptors, work space and preprocessing made once.

torch's own ``torch.sparse.mm`` builds them anew for every call; here only the product itself is repeated.

Shapes: A is N x M with E entries, x [M, F], out [N, F], both row-major.
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p

import torch
from torch import Tensor

ALGORITHMS = {"default": 0, "csr_alg1": 4, "csr_alg2": 6, "csr_alg3": 12}
INDEX_TYPES = {torch.int32: 2, torch.int64: 3}
VALUE_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
NON_TRANSPOSE, BASE_ZERO, ORDER_ROW, COMPUTE_FLOAT32 = 0, 0, 2, 0

_PRODUCT = [c_void_p, c_int, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int]
SIGNATURES = {
    "cusparseCreate": [POINTER(c_void_p)],
    "cusparseDestroy": [c_void_p],
    "cusparseSetStream": [c_void_p, c_void_p],
    "cusparseGetVersion": [c_void_p, POINTER(c_int)],
    "cusparseCreateCsr": [POINTER(c_void_p), *[c_int64] * 3, *[c_void_p] * 3, *[c_int] * 4],
    "cusparseDestroySpMat": [c_void_p],
    "cusparseCreateDnMat": [POINTER(c_void_p), *[c_int64] * 3, c_void_p, c_int, c_int],
    "cusparseDestroyDnMat": [c_void_p],
    "cusparseSpMM_bufferSize": [*_PRODUCT, POINTER(c_size_t)],
    "cusparseSpMM_preprocess": [*_PRODUCT, c_void_p],
    "cusparseSpMM": [*_PRODUCT, c_void_p],
}


def library_paths() -> list[str]:
    """Where libcusparse may be: the one torch has loaded first, then its wheels, then the system's."""
    loaded: list[str] = []
    if os.path.exists("/proc/self/maps"):
        with open("/proc/self/maps") as maps:
            loaded = sorted({line.split()[-1] for line in maps if "libcusparse.so" in line})
    wheels = [path for root in sys.path for path in glob.glob(f"{root}/nvidia/*/lib/libcusparse.so*")]
    system = glob.glob("/usr/local/cuda*/lib64/libcusparse.so*")
    return [*loaded, *wheels, *system, "libcusparse.so.12", "libcusparse.so"]


class Library:
    """libcusparse with checked calls."""

    def __init__(self) -> None:
        torch.cuda.init()
        torch.cuda.current_blas_handle()  # makes torch load its CUDA libraries
        self._dll, self.path = self._open()
        for name, arguments in SIGNATURES.items():
            function = getattr(self._dll, name)
            function.argtypes, function.restype = arguments, c_int
        self._dll.cusparseGetErrorString.argtypes = [c_int]
        self._dll.cusparseGetErrorString.restype = c_char_p

    @staticmethod
    def _open() -> tuple[ctypes.CDLL, str]:
        reasons = []
        for path in library_paths():
            try:
                return ctypes.CDLL(path), path
            except OSError as error:
                reasons.append(str(error))
        raise RuntimeError(f"no libcusparse could be loaded: {'; '.join(reasons)}")

    def call(self, name: str, *arguments) -> None:
        """Call a function and raise with cuSPARSE's own words if it fails."""
        status = getattr(self._dll, name)(*arguments)
        if status:
            reason = self._dll.cusparseGetErrorString(status).decode()
            raise RuntimeError(f"{name} failed with status {status}: {reason}")


class Handle:
    """A cuSPARSE handle."""

    def __init__(self) -> None:
        self.library = Library()
        self.pointer = c_void_p()
        self.library.call("cusparseCreate", byref(self.pointer))

    def version(self) -> int:
        """cuSPARSE's version number."""
        number = c_int()
        self.library.call("cusparseGetVersion", self.pointer, byref(number))
        return number.value

    def use_current_stream(self) -> None:
        """Work goes to torch's current stream (another one while a CUDA graph is recorded)."""
        self.library.call("cusparseSetStream", self.pointer, c_void_p(torch.cuda.current_stream().cuda_stream))


class Product:
    """``out = A @ x`` with everything but the product prepared; calling it runs the product."""

    def __init__(
        self, handle: Handle, indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor, out: Tensor, algorithm: str
    ) -> None:
        self._handle, self._library = handle, handle.library
        self._kept = (indptr, indices, values, x, out)
        self._one, self._zero = c_float(1.0), c_float(0.0)
        self._matrix = self._csr(indptr, indices, values, x.shape[0])
        self._x, self._out = self._dense(x), self._dense(out)
        handle.use_current_stream()
        self._arguments = [
            handle.pointer, NON_TRANSPOSE, NON_TRANSPOSE, byref(self._one), self._matrix, self._x,
            byref(self._zero), self._out, COMPUTE_FLOAT32, ALGORITHMS[algorithm],
        ]  # fmt: skip
        size = c_size_t()
        self._library.call("cusparseSpMM_bufferSize", *self._arguments, byref(size))
        self._buffer = torch.empty(max(size.value, 1), dtype=torch.uint8, device=x.device)
        self._arguments.append(c_void_p(self._buffer.data_ptr()))
        self._library.call("cusparseSpMM_preprocess", *self._arguments)

    def _csr(self, indptr: Tensor, indices: Tensor, values: Tensor, num_cols: int) -> c_void_p:
        descriptor = c_void_p()
        self._library.call(
            "cusparseCreateCsr", byref(descriptor), indptr.numel() - 1, num_cols, indices.numel(),
            indptr.data_ptr(), indices.data_ptr(), values.data_ptr(),
            INDEX_TYPES[indptr.dtype], INDEX_TYPES[indices.dtype], BASE_ZERO, VALUE_TYPES[values.dtype],
        )  # fmt: skip
        return descriptor

    def _dense(self, matrix: Tensor) -> c_void_p:
        descriptor = c_void_p()
        rows, cols = matrix.shape
        self._library.call(
            "cusparseCreateDnMat", byref(descriptor), rows, cols, cols, matrix.data_ptr(),
            VALUE_TYPES[matrix.dtype], ORDER_ROW,
        )  # fmt: skip
        return descriptor

    def __call__(self) -> None:
        self._handle.use_current_stream()
        self._library.call("cusparseSpMM", *self._arguments)

    def close(self) -> None:
        """Destroy the descriptors."""
        self._library.call("cusparseDestroySpMat", self._matrix)
        self._library.call("cusparseDestroyDnMat", self._x)
        self._library.call("cusparseDestroyDnMat", self._out)
