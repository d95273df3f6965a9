"""Read the spec of a command once, and find a misspelt graph before torch is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from weft.core.settings.search_space import Choice
from weft.core.settings.spec_file import read_spec
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.graph.catalog.listing import check_name


def spec_of(path: Path, overrides: Sequence[str] = ()) -> Task | Sweep:
    """The task or sweep in the file; its graphs, where they are named, are known names."""
    stamp = path.stat() if path.is_file() else None
    key = (stamp.st_mtime_ns, stamp.st_size, stamp.st_ino) if stamp else None
    return _read(path, tuple(overrides), key)


@lru_cache(maxsize=1)  # the answer before parsing and the command ask for the same file
def _read(path: Path, overrides: tuple[str, ...], stamp: object) -> Task | Sweep:
    work = read_spec(path, overrides)
    graphs = work.settings["graph"] if isinstance(work, Sweep) else work.graph
    if isinstance(graphs, Choice):
        graphs = graphs.values
    for graph in graphs if isinstance(graphs, (list, tuple)) else [graphs]:
        if isinstance(graph, str):
            check_name(graph)
    return work
