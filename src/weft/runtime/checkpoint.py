"""Checkpoints: the whole training state in one safetensors file, replaced atomically."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weft.core.errors import SpecError
from weft.core.files import replacing
from weft.core.version import __version__
from weft.core.wording import option

FILE = "checkpoint.safetensors"
FORMAT = 1  # of the file; a change that older versions cannot read has the next number


@dataclass(frozen=True)
class Checkpoint:
    """A training state on the CPU, and what it belongs to.

    ``about``: task (as plain data), epoch, seconds trained so far, whether it is finished, Weft's version.
    """

    tensors: dict[str, Tensor]
    about: dict[str, Any]


def write_checkpoint(folder: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
    """Write ``folder/checkpoint.safetensors`` atomically: if interrupted, the former one stays."""
    path = folder / FILE
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    description = json.dumps({**about, "version": __version__})
    metadata = {"weft": description, "format": str(FORMAT), "sha256": _checksum(on_cpu, description)}
    save_atomically(path, on_cpu, metadata)
    return path


def read_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint in ``folder``, checked against its checksum, or None."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            missing = [name for name in ("weft", "sha256", "format") if name not in metadata]
            if missing:
                raise ValueError(f"it has no {missing[0]!r}")
            file_format = int(metadata["format"])
            if file_format <= FORMAT:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                if file_format != FORMAT or _checksum(tensors, metadata["weft"]) != metadata["sha256"]:
                    raise ValueError("its checksum does not match what it holds")
                return Checkpoint(tensors, json.loads(metadata["weft"]))
    except (SafetensorError, ValueError, OSError) as error:
        raise SpecError(
            f"{path}: not a checkpoint of Weft, or a damaged one ({error}); remove it to start afresh"
        ) from None
    raise SpecError(
        f"{path}: a checkpoint of format {file_format}, and this version of Weft reads format {FORMAT}; resume it with "
        "a newer version, or remove it to start afresh"
    )


def _checksum(tensors: Mapping[str, Tensor], description: str) -> str:
    """SHA-256 of a checkpoint: its description, and every tensor with its name, type and shape."""
    digest = hashlib.sha256(description.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def save_atomically(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file next to ``path``, flush it to disk, then rename it."""
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
