"""Compile kernels in CUDA C++ at run time, with the NVRTC library that comes with torch; nothing is built beforehand.

torch's own ``torch.cuda._compile_kernel`` compiles only where a CUDA toolkit is installed, for headers that these
kernels do not include. So the compilation is here, and loading and launching are torch's.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from weft.core.errors import InputError


@cache
def nvrtc() -> ctypes.CDLL | None:
    """The NVRTC library that torch is installed with, or of the system; None if there is none."""
    for path in _libraries():
        try:
            for builtins in path.parent.glob("libnvrtc-builtins.so.*"):  # NVRTC opens it by its name alone
                ctypes.CDLL(str(builtins))
            library = ctypes.CDLL(str(path))
            library.nvrtcCreateProgram  # noqa: B018  torch's library has it from NVRTC, which it is linked with
        except (OSError, AttributeError):
            continue
        return library
    return None


def _libraries() -> Iterator[Path]:
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}" if torch.version.cuda else "libnvrtc.so.*"
    spec = importlib.util.find_spec("nvidia")  # the packages of CUDA's libraries
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        yield from sorted(Path(folder).glob(f"*/lib/{name}"), reverse=True)
    yield Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"
    yield Path(name.replace(".*", ""))


def compile_cuda(source: str, architecture: str) -> bytes:
    """Binary code of ``source``, whose kernels are ``extern "C"``, for an architecture such as ``"sm_90"``."""
    library = nvrtc()
    if library is None:
        raise InputError("there is no NVRTC library, which compiles kernels in CUDA C++; install nvidia-cuda-nvrtc")

    def text(of: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(library, f"nvrtcGet{of}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(library, f"nvrtcGet{of}")(program, buffer)
        return buffer.raw

    program, options = ctypes.c_void_p(), [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"weft.cu", 0, None, None)
    if library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
        log = text("ProgramLog").rstrip(b"\0").decode().strip()
        raise InputError(f"NVRTC cannot compile for {architecture}: {log.partition(chr(10))[0]}")
    binary = text("CUBIN")
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return binary


def cuda_kernels(source: str, device: int) -> Any:
    """The kernels of ``source`` on GPU number ``device``, by their names.

    They are called with ``grid``, ``block``, ``args`` (tensors on the GPU or in pinned memory, and integers of 32 bits)
    and ``shared_mem``, and run on the current stream, captured or not.
    """
    from torch.cuda._utils import _cuda_load_module

    with torch.cuda.device(device):
        return _cuda_load_module(compile_cuda(source, "sm_{}{}".format(*torch.cuda.get_device_capability(device))))
