"""Devices by their full names, so that two of them can be compared."""

from __future__ import annotations

import torch


def exact_device(device: torch.device | str) -> torch.device:
    """``"cuda"`` as the current GPU, such as ``cuda:0``; others as they are."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
