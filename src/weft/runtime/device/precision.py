"""Precision: the type of weights and activations, and how float32 products are computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Float32 products in full (``fp32``) or through TF32 units (``tf32``) inside, restored outside."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
