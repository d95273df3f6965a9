"""Seed torch's generators for a run, for models that draw from them, and restore them after it.

Weft's layers do not need this (their randomness is counted, see :mod:`weft.ops.random_bits`); a user's may.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

HOST, CUDA, PYTHON = "random.cpu", "random.cuda", "python"  # generators: torch's by their names in a checkpoint


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's, Python's and NumPy's generators start at ``seed`` inside, and are restored outside."""
    with same_draws(device):
        seed_all(seed)
        yield


def seed_all(seed: int) -> None:
    """Start torch's, Python's and NumPy's generators at ``seed``."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """The states of the generators, for a checkpoint."""
    states = {HOST: torch.get_rng_state()}
    if device.type == "cuda":
        states[CUDA] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(saved: Mapping[str, Tensor], device: torch.device) -> None:
    """The inverse of :func:`generator_states`."""
    if HOST in saved:
        torch.set_rng_state(saved[HOST])
    if CUDA in saved and device.type == "cuda":
        torch.cuda.set_rng_state(saved[CUDA], device)


@contextmanager
def same_draws(device: torch.device) -> Iterator[Callable[[], set[str]]]:
    """Restore torch's, Python's and NumPy's generators at the end; gives which have moved: names of states of torch's,
    and PYTHON for one of the others.
    """
    torch_states, python, numpy = generator_states(device), random.getstate(), np.random.get_state(legacy=False)

    def moved() -> set[str]:
        names, now = generator_states(device), np.random.get_state(legacy=False)
        outside = str(now) != str(numpy) or now["state"]["pos"] != numpy["state"]["pos"]
        drawn = {name for name, state in names.items() if not torch.equal(state, torch_states[name])}
        return drawn | ({PYTHON} if outside or random.getstate() != python else set())

    try:
        yield moved
    finally:
        restore_generators(torch_states, device)
        random.setstate(python)
        np.random.set_state(numpy)


class OwnGenerator:
    """Torch's generators with states of their own per run, while other runs draw from them in between.

    They start at ``seed``; each ``with own:`` continues from the end of the last one. ``states`` are for a checkpoint.
    ``with_python``: so do Python's and NumPy's; to exchange them takes 80 us.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
        self.states = {HOST: torch.Generator().manual_seed(seed).get_state()}
        if device.type == "cuda":
            self.states[CUDA] = torch.Generator(device).manual_seed(seed).get_state()
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % (1 << 32)).get_state(legacy=False)
        self.with_python = True

    def __enter__(self) -> None:
        self._outside = generator_states(self._device)
        restore_generators(self.states, self._device)
        if self.with_python:
            self._others = random.getstate(), np.random.get_state(legacy=False)
            random.setstate(self._python)
            np.random.set_state(self._numpy)

    def __exit__(self, *_: object) -> None:
        self.states = generator_states(self._device)
        restore_generators(self._outside, self._device)
        if self.with_python:
            self._python, self._numpy = random.getstate(), np.random.get_state(legacy=False)
            random.setstate(self._others[0])
            np.random.set_state(self._others[1])


# ---- Limit the number of threads that torch and Weft's kernels use during a run on a CPU, and time what they do.


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """At most ``count`` threads inside (None: unchanged), restored outside."""
    before = torch.get_num_threads()
    if count is not None and count < before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def step_seconds() -> float:
    """A clock for steps on a CPU: seconds that this thread computed, if torch computes in it alone, else the time.

    What other processes do meanwhile counts in the second case only.
    """
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


# ---- Precision: the type of weights and activations, and how float32 products are computed.

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
