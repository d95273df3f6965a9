"""FormFiles: which derived forms are remembered under ``$WEFT_HOME/forms``; the least recently used go first."""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.core.units import parse_bytes
from weft.engine.base.home import home

FOLDER, META, DRAFT = "forms", "meta.json", ".draft-"
LIMIT_VARIABLE, LIMIT = "WEFT_FORMS", 16 << 30  # bytes of all forms together
STALE_SECONDS = 3600.0  # a draft that old was left by a process that died


@dataclass(frozen=True)
class FormEntry:
    """A form that is remembered: of which graph, what making it took, and when it was last used."""

    graph: str
    form: str
    bytes: int
    seconds: float
    last_use: float
    path: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


class FormFiles:
    """The forms in ``folder`` (None: under Weft's home), at most ``limit`` bytes of them (None: $WEFT_FORMS)."""

    def __init__(self, folder: Path | None = None, limit: int | None = None) -> None:
        self.folder = home() / FOLDER if folder is None else folder
        self.limit = limit_of_forms() if limit is None else limit

    def entries(self) -> list[FormEntry]:
        """What is remembered, the most recently used first; what cannot be read is left out."""
        found = []
        for meta in self.folder.glob(f"*/{META}"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                about = json.loads(meta.read_text(encoding="utf-8"))
                values = (str(about["graph"]), str(about["form"]), int(about["bytes"]), float(about["seconds"]))
                found.append(FormEntry(*values, meta.stat().st_mtime, str(meta.parent)))
        return sorted(found, key=lambda entry: entry.last_use, reverse=True)

    def clear(self) -> int:
        """Remove everything; how many bytes that were."""
        size = sum(entry.bytes for entry in self.entries())
        if self.folder.is_dir():
            shutil.rmtree(self.folder)
        return size

    def trim(self, newest: str) -> None:
        """Remove the least recently used beyond the limit, but not ``newest``, and what dead processes left."""
        total = 0
        for entry in self.entries():
            total += entry.bytes
            if total > self.limit and not entry.path.endswith(newest):
                shutil.rmtree(entry.path, ignore_errors=True)
        for draft in self.folder.glob(f"{DRAFT}*"):
            with suppress(OSError):
                if time.time() - draft.stat().st_mtime > STALE_SECONDS:
                    shutil.rmtree(draft, ignore_errors=True)


def limit_of_forms() -> int:
    """Bytes from $WEFT_FORMS; 0: nothing is remembered."""
    given = os.environ.get(LIMIT_VARIABLE, "").strip()
    if not given:
        return LIMIT
    return 0 if given == "0" else parse_bytes(given, LIMIT_VARIABLE)
