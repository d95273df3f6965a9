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
    """Torch's, Python's and NumPy's generators start at ``seed`` inside, and are restored outside."""
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            seed_all(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def seed_all(seed: int) -> None:
    """Start torch's, Python's and NumPy's generators at ``seed``."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


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
    ``with_python``: so do Python's and NumPy's; to exchange them takes 80 us.
    """

    def __init__(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed).get_state()
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % (1 << 32)).get_state(legacy=False)
        self.with_python = True

    def __enter__(self) -> None:
        self._outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        if self.with_python:
            self._others = random.getstate(), np.random.get_state(legacy=False)
            random.setstate(self._python)
            np.random.set_state(self._numpy)

    def __exit__(self, *_: object) -> None:
        self.state = torch.get_rng_state()
        torch.set_rng_state(self._outside)
        if self.with_python:
            self._python, self._numpy = random.getstate(), np.random.get_state(legacy=False)
            random.setstate(self._others[0])
            np.random.set_state(self._others[1])
