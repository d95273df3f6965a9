"""Seed torch's generators for a run, for models that draw from them, and restore them after it.

Weft's layers do not need this (their randomness is counted, see :mod:`weft.ops.random.torch_bits`); a user's may.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Generators start at ``seed`` inside, and are restored outside."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """The states of the generators, for a checkpoint."""
    states = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(saved: Mapping[str, Tensor], device: torch.device) -> None:
    """The inverse of :func:`generator_states`."""
    if "random.cpu" in saved:
        torch.set_rng_state(saved["random.cpu"])
    if "random.cuda" in saved and device.type == "cuda":
        torch.cuda.set_rng_state(saved["random.cuda"], device)


@contextmanager
def same_draws(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Restore torch's, Python's and NumPy's generators at the end; gives whether the latter two have moved."""
    torch_states, python, numpy = generator_states(device), random.getstate(), np.random.get_state(legacy=False)

    def moved() -> bool:
        now = np.random.get_state(legacy=False)
        return random.getstate() != python or str(now) != str(numpy) or now["state"]["pos"] != numpy["state"]["pos"]

    try:
        yield moved
    finally:
        restore_generators(torch_states, device)
        random.setstate(python)
        np.random.set_state(numpy)


class OwnGenerator:
    """Torch's CPU generator with a state of its own per run, while other runs draw from it in between.

    It starts at ``seed``; each ``with own:`` continues from the end of the last one. ``state`` is for a checkpoint.
    """

    def __init__(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed).get_state()

    def __enter__(self) -> None:
        self._outside = torch.get_rng_state()
        torch.set_rng_state(self.state)

    def __exit__(self, *_: object) -> None:
        self.state = torch.get_rng_state()
        torch.set_rng_state(self._outside)
