"""FormStore: arrays derived from graphs, in files that are mapped on reading.

    forms/<key>/meta.json       what it is of, type, shape and SHA-256 of every array
    forms/<key>/<array>.npy     mapped on reading

A key is a digest of all that the arrays depend on. A folder is written under another name and then renamed, so it is
whole or absent; one whose checksums do not agree is removed and counts as absent.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from weft.core.errors import GraphError
from weft.core.units import show_bytes
from weft.engine.forms.form_files import DRAFT, META, FormFiles
from weft.graph.data.mapped_array import ArraySpec, map_array, write_array
from weft.ops.csr.keeping import Arrays, content_digest

SPARE = 4  # a form is written if the disk has this many times its bytes


class FormStore(FormFiles):
    """Reads and writes forms."""

    def get(self, key: str) -> Arrays | None:
        """The arrays under ``key``, mapped and found to be what was written; None if they are not there."""
        place = self.folder / key
        try:
            meta = json.loads((place / META).read_text(encoding="utf-8"))
            arrays = {name: _read(place, name, about) for name, about in meta["arrays"].items()}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, GraphError):
            shutil.rmtree(place, ignore_errors=True)
            return None
        with suppress(OSError):  # a home that is read only
            os.utime(place / META)
        return arrays

    def put(self, key: str, arrays: Arrays, graph: str, form: str, seconds: float) -> None:
        """Write arrays under ``key``; an OSError says why they cannot be."""
        size = sum(array.nbytes for array in arrays.values())
        self.folder.mkdir(parents=True, exist_ok=True)
        self._check_room(size)
        draft = self.folder / f"{DRAFT}{secrets.token_hex(6)}"
        try:
            draft.mkdir()
            written = {name: _write(draft, name, array) for name, array in arrays.items()}
            about = {"graph": graph, "form": form, "bytes": size, "seconds": round(seconds, 3), "arrays": written}
            (draft / META).write_text(json.dumps(about, indent=1), encoding="utf-8")
            with suppress(OSError):  # another process was first, with the same
                os.rename(draft, self.folder / key)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        self.trim(key)

    def _check_room(self, size: int) -> None:
        if size > self.limit:
            raise OSError(f"{show_bytes(size)} are more than the {show_bytes(self.limit)} for all forms")
        free = shutil.disk_usage(self.folder).free
        if SPARE * size > free:
            raise OSError(f"{self.folder} has {show_bytes(free)} free, too little beside {show_bytes(size)}")


def _write(folder: Path, name: str, array: Tensor) -> dict[str, Any]:
    spec = write_array(folder / f"{name}.npy", array, flush=False)
    return {**spec.to_dict(), "sha256": content_digest([array])}


def _read(folder: Path, name: str, about: Mapping[str, Any]) -> Tensor:
    array = map_array(folder / f"{name}.npy", ArraySpec.from_dict(about))
    if content_digest([array]) != about["sha256"]:
        raise ValueError(f"{name} has another checksum")
    return array
