"""Tell whether Weft's code or torch has changed since something was kept."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

import torch


@cache
def code_digest() -> str:
    """Weft's source files by name, size and time, and torch's version: a change of either starts afresh."""
    root = Path(__file__).parents[2]
    found = [f"torch {torch.__version__}"]
    for folder, _, names in sorted(os.walk(root)):
        for name in sorted(name for name in names if name.endswith(".py")):
            status = os.stat(os.path.join(folder, name))
            found.append(f"{folder}/{name} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]
