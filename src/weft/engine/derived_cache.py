"""Remember the forms of a large graph on the host while a group is built and trained on it.

On a CPU a graph of 12 million edges takes 0.5 s to get its self loops, 0.8 s to be transposed and 0.7 s for the first
aggregation of 100 features; to digest the graph and to read any of them again takes 0.05 to 0.1 s. On a GPU they are
expected to be made faster than read (not measured), and are not kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.core.units import parse_bytes, show_bytes
from weft.engine.home import home
from weft.engine.kernel_store import code_digest
from weft.graph.graph import Graph
from weft.graph.saved import ArraySpec, map_array, write_array
from weft.ops.csr.adjacency import Adjacency, Arrays, Build, content_digest

# ---- FormFiles: which derived forms are remembered under ``$WEFT_HOME/forms``; the least recently used go first.

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


# ---- FormStore: arrays derived from graphs, in files that are mapped on reading.
#
#     forms/<key>/meta.json       what it is of, type, shape and SHA-256 of every array
#     forms/<key>/<array>.npy     mapped on reading
#
# A key is a digest of all that the arrays depend on. A folder is written under another name and then renamed, so it is
# whole or absent; one whose checksums do not agree is removed and counts as absent.

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


LEAST_EDGES = 1 << 20  # a smaller graph is derived from in a tenth of a second
LEAST_SECONDS = 0.1  # a form that took less to make is not worth a file
READ_RATE = 0.5e9  # bytes per second, at worst, of files that are read, mapped and checked


class FormKeeper:
    """The ``keep`` of one graph's adjacency; ``problem`` says why something could not be written."""

    def __init__(self, graph: Graph, store: FormStore) -> None:
        self._graph, self._store = graph, store
        self.open, self.problem = True, ""

    def __call__(self, form: str, build: Build) -> Arrays:
        """The arrays of ``form``, remembered or made now."""
        if not self.open:
            return build()
        key = self._key(form)
        found = self._store.get(key)
        return self._made(key, form, build) if found is None else found

    def _made(self, key: str, form: str, build: Build) -> Arrays:
        begin = time.perf_counter()
        arrays = build()
        took = time.perf_counter() - begin
        if took > max(LEAST_SECONDS, sum(array.nbytes for array in arrays.values()) / READ_RATE):
            try:
                self._store.put(key, arrays, self._graph.name, form, took)
            except OSError as error:
                self.problem = f"forms of graph {self._graph.name!r} are not remembered: {error.strerror or error}"
        return arrays

    def _key(self, form: str) -> str:
        parts = (code_digest(), platform.machine(), torch.backends.cpu.get_cpu_capability(), self._content, form)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]

    @cached_property
    def _content(self) -> str:
        adj = self._graph.adj
        return content_digest([adj.indptr, adj.indices, adj.weight], adj.num_cols, adj.symmetric)


@contextmanager
def kept_forms(graph: Graph) -> Iterator[FormKeeper | None]:
    """Inside, forms of ``graph`` that take long to make are remembered; None if it is not worth it."""
    store, adj = FormStore(), graph.adj
    worth = adj.device.type == "cpu" and adj.num_edges >= LEAST_EDGES and type(adj) is Adjacency
    if not worth or not store.limit:
        yield None
        return
    keeper = FormKeeper(graph, store)
    adj.keep = keeper
    try:
        yield keeper
    finally:
        keeper.open, adj.keep = False, None
