"""Where arrays that take long to derive from a matrix may be remembered between processes.

A matrix whose ``keep`` is set asks it for such arrays, by the name of the form and a function that makes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

Arrays = Mapping[str, Tensor]
Build = Callable[[], Arrays]
Keep = Callable[[str, Build], Arrays]
BLOCK = 1 << 24  # values that are digested at once


def kept(keep: Keep | None, form: str, build: Build) -> Arrays:
    """The arrays of ``form``: remembered ones, else those that ``build`` makes."""
    return build() if keep is None else keep(form, build)


def below(keep: Keep | None, form: str) -> Keep | None:
    """For a matrix that is itself a ``form``: what is derived from it is remembered under both names."""
    if keep is None:
        return None
    return lambda inner, build: keep(f"{form}/{inner}", build)


def content_digest(tensors: Iterable[Tensor | None], *about: object) -> str:
    """A digest of the types, shapes and values of tensors on the host, and of what else they are."""
    digest = hashlib.sha256(repr(about).encode())
    for tensor in tensors:
        digest.update(b"none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor is not None:
            for block in _blocks(tensor):
                digest.update(block)
    return digest.hexdigest()


def _blocks(tensor: Tensor) -> Iterable[memoryview]:
    """The values as bytes, without a copy of more than a block."""
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), BLOCK):
        yield memoryview(flat[start : start + BLOCK].contiguous().view(torch.uint8).numpy())
