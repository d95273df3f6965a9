"""Keep arrays derived from a large graph on disk while a group is built and trained on it (``$WEFT_HOME/forms``).

On a CPU a graph of 12 million edges takes 0.5 s to get its self loops, 0.8 s to be transposed and 0.7 s for the first
aggregation of 100 features; to digest the graph and to read any of them again takes 0.05 to 0.1 s. On a GPU they are
expected to be made faster than read (not measured), and are not kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from weft.core.errors import GraphError
from weft.core.keyed_store import KeyedStore
from weft.core.units import parse_bytes
from weft.engine.home import code_digest, home
from weft.graph.graph import Graph
from weft.graph.saved import ArraySpec, map_array, write_array
from weft.ops.csr.adjacency import Adjacency, Arrays, Build, content_digest

FOLDER, META = "forms", "meta.json"
LIMIT_VARIABLE, LIMIT = "WEFT_FORMS", 16 << 30  # bytes of all forms together
LEAST_EDGES = 1 << 20  # a smaller graph is derived from in a tenth of a second
LEAST_SECONDS = 0.1  # a form that took less to make is not worth a file
READ_RATE = 0.5e9  # bytes per second, at worst, of files that are read, mapped and checked


class FormStore(KeyedStore):
    """Forms in ``folder`` (None: under Weft's home), at most ``limit`` bytes of them (None: $WEFT_FORMS).

    An entry is a folder with ``meta.json``, which has type, shape and SHA-256 of every array, and the arrays as
    ``.npy`` files that are mapped on reading. Its key is a digest of all that the arrays depend on.
    """

    def __init__(self, folder: Path | None = None, limit: int | None = None) -> None:
        if limit is None:
            text = os.environ.get(LIMIT_VARIABLE, "").strip()
            limit = LIMIT if not text else 0 if text == "0" else parse_bytes(text, LIMIT_VARIABLE)
        super().__init__(home() / FOLDER if folder is None else folder, max_bytes=limit)

    def forms(self) -> list[dict[str, Any]]:
        """Each form as plain data, the most recently used first; what cannot be read is left out.

        It says of which graph it is, how long it took to make, and when it was last used.
        """
        forms = []
        for entry in self.entries():
            with suppress(OSError, ValueError, KeyError, TypeError):
                meta = json.loads((entry.path / META).read_text(encoding="utf-8"))
                named = {name: meta[name] for name in ("graph", "form", "bytes", "seconds")}
                forms.append({**named, "last_use": entry.last_use, "path": str(entry.path)})
        return forms

    def get(self, key: str) -> Arrays | None:
        """The arrays under ``key``, mapped and checked; None if they are not there. Damaged ones are removed."""
        meta: Mapping[str, Any] = self.read(f"{key}/{META}", dict) or {}
        arrays = {}
        try:
            for name, spec in meta["arrays"].items():
                arrays[name] = map_array(self.folder / key / f"{name}.npy", ArraySpec.from_dict(spec))
                if content_digest([arrays[name]]) != spec["sha256"]:
                    raise GraphError(f"{self.folder / key / name} has another checksum")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, GraphError):
            self.remove(key)
            return None
        return arrays

    def put(self, key: str, arrays: Arrays, graph: str, form: str, seconds: float) -> None:
        """Write arrays under ``key``; an OSError says why they cannot be."""
        size = sum(array.nbytes for array in arrays.values())
        with self.writing(key, size) as draft:
            specs = {}
            for name, array in arrays.items():
                spec = write_array(draft / f"{name}.npy", array, flush=False)
                specs[name] = {**spec.to_dict(), "sha256": content_digest([array])}
            meta = {"graph": graph, "form": form, "bytes": size, "seconds": round(seconds, 3), "arrays": specs}
            (draft / META).write_text(json.dumps(meta, indent=1), encoding="utf-8")


class FormKeeper:
    """The ``keep`` of one graph's adjacency; ``problem`` says why something could not be written."""

    def __init__(self, graph: Graph, store: FormStore) -> None:
        self._graph, self._store = graph, store
        self.open, self.problem = True, ""

    def __call__(self, form: str, build: Build) -> Arrays:
        """The arrays of ``form``, read or made now."""
        if not self.open:
            return build()
        parts = (code_digest(), platform.machine(), torch.backends.cpu.get_cpu_capability(), self._content, form)
        key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
        arrays = self._store.get(key)
        if arrays is not None:
            return arrays
        begin = time.perf_counter()
        arrays = build()
        seconds = time.perf_counter() - begin
        if seconds > max(LEAST_SECONDS, sum(array.nbytes for array in arrays.values()) / READ_RATE):
            try:
                self._store.put(key, arrays, self._graph.name, form, seconds)
            except OSError as error:
                self.problem = f"forms of graph {self._graph.name!r} are not remembered: {error.strerror or error}"
        return arrays

    @cached_property
    def _content(self) -> str:
        adj = self._graph.adj
        return content_digest([adj.indptr, adj.indices, adj.weight], adj.num_cols, adj.symmetric)


@contextmanager
def kept_forms(graph: Graph) -> Iterator[FormKeeper | None]:
    """Keep forms of ``graph`` that take long to make; None if it is not worth it."""
    store, adj = FormStore(), graph.adj
    worth = adj.device.type == "cpu" and adj.num_edges >= LEAST_EDGES and type(adj) is Adjacency
    if not worth or not store.max_bytes:
        yield None
        return
    keeper = FormKeeper(graph, store)
    adj.keep = keeper
    try:
        yield keeper
    finally:
        keeper.open, adj.keep = False, None
