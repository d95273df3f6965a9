"""Checkpoints: the whole training state in one safetensors file, replaced atomically."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weft.core.errors import SpecError
from weft.core.files import replacing
from weft.core.startup import MadeAhead
from weft.core.version import __version__
from weft.core.wording import option

# ---- A checkpoint as data: tensors on the CPU, and what they belong to.


@dataclass(frozen=True)
class Checkpoint:
    """A training state on the CPU, and what it belongs to.

    ``about``: task (as plain data), epoch, seconds trained so far, whether it is finished, Weft's version.
    """

    tensors: dict[str, Tensor]
    about: dict[str, Any]


# ---- Checkpoints that were read and checked before the group that goes on from them starts.

_READ: ContextVar[ReadAhead | None] = ContextVar("checkpoints read ahead", default=None)


class ReadAhead:
    """Checkpoints by their file and its state, so that one that was written anew is another.

    Beyond ``most_bytes`` the oldest are let go.
    """

    def __init__(self, most_bytes: int) -> None:
        self._read: MadeAhead[Hashable, Checkpoint] = MadeAhead(most_bytes, _bytes)

    @property
    def bytes(self) -> int:
        """Of all checkpoints that are here."""
        return self._read.bytes

    def has(self, path: Path) -> bool:
        """Whether the checkpoint in the file ``path``, as it is now, is here."""
        return self._read.has(state_of(path))

    def put(self, path: Path, read: Callable[[Path], Checkpoint]) -> None:
        """Keep what ``read`` makes of the file ``path``, unless it is here or was written anew meanwhile."""
        key = state_of(path)
        if key is None or self._read.has(key):
            return
        found = read(path)
        if key == state_of(path):
            self._read.put(key, found)

    def find(self, path: Path) -> Checkpoint | None:
        """A copy of the checkpoint that shares its tensors; None if it was not read."""
        found = self._read.find(state_of(path))
        return None if found is None else replace(found, tensors=dict(found.tensors), about=deepcopy(found.about))

    def drop_used(self) -> None:
        """Let those go that a group went on from."""
        self._read.drop_used()


def state_of(path: Path) -> Hashable:
    """What tells a file from another one that was there before; None if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (os.path.abspath(path), found.st_ino, found.st_mtime_ns, found.st_size)


def _bytes(checkpoint: Checkpoint) -> int:
    return sum(tensor.nbytes for tensor in checkpoint.tensors.values())


@contextmanager
def reading_from(read: ReadAhead) -> Iterator[None]:
    """Checkpoints that are wanted inside are those of ``read``, as far as it has them."""
    token = _READ.set(read)
    try:
        yield
    finally:
        _READ.reset(token)


def read_before(path: Path) -> Checkpoint | None:
    """A checkpoint that was read ahead; None if it was not."""
    read = _READ.get()
    return None if read is None else read.find(path)


FILE = "checkpoint.safetensors"


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
    """Write ``folder/checkpoint.safetensors`` atomically: if interrupted, the former one stays."""
    path = folder / FILE
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    said = json.dumps({**about, "version": __version__})
    metadata = {"weft": said, "sha256": _checksum(on_cpu, said)}
    save_atomically(path, on_cpu, metadata)
    return path


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint in ``folder``, or None."""
    path = folder / FILE
    if not path.exists():
        return None
    return read_before(path) or read_file(path)


def read_file(path: Path) -> Checkpoint:
    """The checkpoint in the file ``path``, checked against its checksum."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            missing = [name for name in ("weft", "sha256") if name not in metadata]
            if missing:
                raise ValueError(f"it has no {missing[0]!r}")
            said, expected = metadata["weft"], metadata["sha256"]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if _checksum(tensors, said) != expected:
            raise ValueError("its checksum does not match what it holds")
        return Checkpoint(tensors, json.loads(said))
    except (SafetensorError, ValueError, OSError) as error:
        raise SpecError(
            f"{path}: not a checkpoint of Weft, or a damaged one ({error}); remove it to start afresh"
        ) from None


def _checksum(tensors: Mapping[str, Tensor], said: str) -> str:
    """SHA-256 of a checkpoint: its description, and every tensor with its name, type and shape."""
    found = hashlib.sha256(said.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
    return found.hexdigest()


def save_atomically(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file beside ``path``, flush it to disk, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, flush=True) as partial:
        partial.touch()
        mode = partial.stat().st_mode
        save_file(tensors, partial, metadata=metadata)
        partial.chmod(mode)  # safetensors makes it readable by the owner only


def check_same_task(saved: Mapping[str, Any], task: Mapping[str, Any], path: Path) -> None:
    """A :class:`SpecError` that names the first setting in which a checkpoint's task differs."""
    for key in task:
        if key not in saved and not task[key]:
            continue  # a setting newer than the checkpoint, which this task leaves at its default
        if key != "name" and saved.get(key) != task[key]:
            raise SpecError(
                f"{path}: was trained with {key}={saved.get(key)!r}, but this task has {key}={task[key]!r}; "
                f"resume with the same settings, or choose another {option('out')} to start afresh"
            )
