"""What a worker makes ready for the group that is likely to be next, while another one trains.

Initial weights of new trainings are drawn (on the host, where models are built), and checkpoints that trainings go on
from are read and checked: weights, moments, best weights, history. Graphs are fetched by :mod:`kept_graphs`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from weft import nn
from weft.core.task import Task
from weft.engine.base.graph_cache import Graphs
from weft.engine.base.graph_store import GraphStore
from weft.nn.drawn_ahead import DrawnAhead, Key, drawing_from
from weft.nn.initial import draw_ahead
from weft.runtime.checkpoint import FILE, read_file
from weft.runtime.read_ahead import ReadAhead, reading_from
from weft.runtime.user_modules.build import model_options

DRAWN_BYTES = 128 << 20  # of initial weights, on the host
READ_BYTES = 256 << 20  # of checkpoints, on the host
MOST_NAMES = 64  # tasks of which is known what was drawn
Wanted = tuple[Sequence[Mapping[str, Any]], Sequence[str]]


class PreparedStarts:
    """Weights and checkpoints that were made ready; ``store`` has the graphs, whose sizes models depend on."""

    def __init__(self, store: GraphStore) -> None:
        self._store = store
        self._drawn, self._read = DrawnAhead(DRAWN_BYTES), ReadAhead(READ_BYTES)
        self._keys: dict[str, list[Key]] = {}  # what was drawn, by the names of tasks
        self._wanted: queue.SimpleQueue[Wanted] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def fetch(self, tasks: Sequence[Mapping[str, Any]], folders: Sequence[str]) -> None:
        """Make ready what ``tasks`` begin with, and the checkpoints in ``folders``, in a thread of its own."""
        if not tasks and not folders:
            return
        self._wanted.put((tasks, folders))
        if self._thread is None:
            self._thread = threading.Thread(target=self._fetch_on, name="prepares starts", daemon=True)
            self._thread.start()

    def _fetch_on(self) -> None:
        while True:
            wanted = self._wanted.get()
            while not self._wanted.empty():  # only what was wanted last is likely to be next
                wanted = self._wanted.get()
            self.prepare(*wanted)

    def prepare(self, tasks: Sequence[Mapping[str, Any]], folders: Sequence[str]) -> None:
        """The same at once."""
        for path in [path for folder in folders for path in checkpoints_in(Path(folder))]:
            with suppress(Exception):  # a damaged one is reported by the group that goes on from it
                self._read.put(path, read_file)
        for settings in tasks:
            with suppress(Exception):  # whatever is wrong with a task, its own run will report
                self._draw(Task.from_dict(settings))

    def _draw(self, task: Task) -> None:
        """Draw the initial weights of one of Weft's own models; others draw from generators of the whole process."""
        if task.traits is None:
            return
        stats = Graphs(on_host=True, store=self._store).stats(task)
        relations = {"num_relations": stats.num_relations} if task.traits.relational else {}
        with torch.device("meta"):
            model = nn.build(task.model, stats.num_features, stats.num_classes, **model_options(task), **relations)
        self._keys[task.label] = draw_ahead(model, task.seed, self._drawn)
        while len(self._keys) > MOST_NAMES:
            self._keys.pop(next(iter(self._keys)))

    def ready(self, tasks: Sequence[Task], folder: Path) -> dict[str, Any]:
        """What is ready of a group that starts now; ``checkpoint`` is None if it begins anew."""
        paths = checkpoints_in(folder)
        return {
            "graph": isinstance(tasks[0].graph, str) and self._store.holds(tasks[0].graph),
            "weights": sum(self._has_weights(task.label) for task in tasks),
            "checkpoint": all(self._read.has(path) for path in paths) if paths else None,
        }

    def _has_weights(self, task: str) -> bool:
        keys = self._keys.get(task)
        return bool(keys) and all(map(self._drawn.has, keys or ()))

    def reading(self) -> AbstractContextManager[None]:
        """Checkpoints that are wanted inside need not be read again."""
        return reading_from(self._read)

    @contextmanager
    def using(self) -> Iterator[None]:
        """A group that starts inside begins with what is ready; afterwards what it used is let go."""
        try:
            with drawing_from(self._drawn), reading_from(self._read):
                yield
        finally:
            self._drawn.drop_used()
            self._read.drop_used()


def checkpoints_in(folder: Path) -> list[Path]:
    """The files of checkpoints in a run's folder."""
    return [path for path in (folder / FILE, *sorted(folder.glob(f"groups/*/{FILE}"))) if path.exists()]
