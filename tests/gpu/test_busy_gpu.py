"""How busy a GPU is, as the dashboard shows it."""

from __future__ import annotations

import time

import pytest
import torch

from weft.core.gpus import busy_share

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_driver_says_how_busy_a_gpu_is():
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    matrix, until, seen = torch.rand(4096, 4096, device="cuda"), time.monotonic() + 3.0, 0.0
    while time.monotonic() < until:
        for _ in range(20):
            matrix @ matrix
        torch.cuda.synchronize()
        seen = max(seen, busy_share(uuid) or 0.0)
    assert 0.3 < seen <= 1.0
    assert busy_share("GPU-of-nobody") is None
