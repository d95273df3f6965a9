"""Remember the digest that Triton's cache begins every key with.

Every process that launches a kernel reads and hashes all of Triton for it, 400 MB: a third of a second to a second. It
depends on Triton's files alone, so it is kept beside their sizes and times, and computed again if any of them changes.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weft.core.files import write_text
from weft.ops.launch.backend import have_triton

FILE = "triton_key.json"


def keep_triton_key(folder: Path) -> None:
    """Let Triton in this process use the digest that is kept in ``folder``; the first time it is computed and kept."""
    if not have_triton():
        return
    import triton.runtime.cache as cache

    compute = getattr(cache, "triton_key", None)
    if compute is None or getattr(compute, "weft_kept", False):  # another version of Triton, or done
        return
    stamp = _stamp()
    value = _read(folder / FILE, stamp)
    if value is None:
        value = compute()
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / FILE, json.dumps({"stamp": stamp, "key": value}))

    def triton_key() -> str:
        return value

    triton_key.weft_kept = True  # type: ignore[attr-defined]
    cache.triton_key = triton_key


def _read(path: Path, stamp: str) -> str | None:
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return str(data["key"]) if data["stamp"] == stamp else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _stamp() -> str:
    """Triton's files by name, size and time."""
    spec = find_spec("triton")
    root = Path(spec.origin).parent if spec is not None and spec.origin else Path()
    found = []
    for folder, _, names in sorted(os.walk(root)):
        for name in sorted(name for name in names if name.endswith((".py", ".so"))):
            status = os.stat(os.path.join(folder, name))
            found.append(f"{folder}/{name} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(found).encode()).hexdigest()
