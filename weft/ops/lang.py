"""Triton's language where it is installed; inert stand-ins where it is not.

A machine without a GPU needs no Triton to train. There the kernels below are never launched, but the
modules that hold them are imported.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from weft.ops.backend import have_triton

if have_triton():
    import triton
    import triton.language as tl
else:

    def _keep(function: Any) -> Any:
        return function

    triton: Any = SimpleNamespace(jit=_keep)  # type: ignore[no-redef]
    tl: Any = SimpleNamespace()  # type: ignore[no-redef]

__all__ = ["tl", "triton"]
