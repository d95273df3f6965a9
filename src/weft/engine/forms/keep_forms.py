"""Remember the forms of a large graph on the host while a group is built and trained on it.

On a CPU a graph of 12 million edges takes 0.5 s to get its self loops, 0.8 s to be transposed and 0.7 s for the first
aggregation of 100 features; to digest the graph and to read any of them again takes 0.05 to 0.1 s. On a GPU they are
expected to be made faster than read (not measured), and are not kept.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch

from weft.engine.base.code_digest import code_digest
from weft.engine.forms.form_store import FormStore
from weft.graph.data.graph import Graph
from weft.ops.csr.adjacency import Adjacency
from weft.ops.csr.keeping import Arrays, Build, content_digest

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
