"""The trainings whose memory and time are estimated: CoGNN's five queues, users' modules, PyG's modules.

A queue of CoGNN has 20 trainings of one model (or of all four: Mix), 4 to 10 layers of 64, on the 11 shapes of its
Table IV. Which of the 77 combinations a queue has is not published; here they are drawn by seed, every shape at least
once. All settings are plain data, so that a graph can be shared by everything that is trained on it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from benchmarks.baselines.modules import OPAQUE, opaque_module, random_module
from benchmarks.baselines.users_modules import NAMES, users_module
from weft.core.models import BUILT_IN
from weft.core.task import Task
from weft.graph.graph import Graph

SHAPES = (
    "cora", "citeseer", "pubmed", "proteins", "artist", "soc-blog", "dd", "amazon0601", "twitter", "yeast", "ovcar-8h",
)  # fmt: skip
LAYERS = range(4, 11)
QUEUES = ("gcn", "sage", "gat", "gin", "mix")
QUEUE_LENGTH = 20
MODULES = 20
MODULE_SHAPES = ("pubmed", "artist", "soc-blog", "dd", "amazon0601")
OPAQUE_SHAPES = ("pubmed", "soc-blog", "amazon0601")
USERS_SHAPES = ("pubmed", "soc-blog", "ogbn-arxiv")
SETS = ("queues", "modules", "opaque", "users")


@dataclass(frozen=True)
class Entry:
    """One training: the set it belongs to, its name and shape, and what model it is."""

    kind: str  # of SETS
    queue: str
    shape: str
    model: str
    layers: int = 0
    seed: int = 0

    @property
    def name(self) -> str:
        """``"gcn-7"``, ``"random-3"``, ``"pyg-gat"``."""
        return f"{self.model}-{self.layers}" if self.kind == "queues" else self.model

    def tasks(self, graph: Graph, count: int, hidden: int) -> list[Task]:
        """``count`` such trainings that differ in their seeds and rates."""
        settings: dict[str, Any] = {"model": self._model(hidden), "epochs": 400}
        if self.kind == "queues":
            settings |= {"layers": self.layers, "hidden": hidden}
            settings |= {"heads": 4, "out_heads": 4} if BUILT_IN[self.model].has_heads else {}
        return [Task(graph=graph, name=f"{self.name}-{i}", seed=i, lr=0.01 / (1 + i), **settings) for i in range(count)]

    def _model(self, hidden: int) -> Any:
        if self.kind == "modules":
            return random_module(self.seed)
        if self.kind == "users":
            return users_module(self.model, hidden)
        return opaque_module(self.model, hidden=hidden) if self.kind == "opaque" else self.model


def queue(name: str) -> list[Entry]:
    """The 20 trainings of one of CoGNN's queues: every shape at least once, the rest drawn."""
    draw = random.Random(f"queue {name}")
    models = QUEUES[:-1] if name == "mix" else (name,)
    places = [(shape, layers) for shape in SHAPES for layers in LAYERS]
    first = [(shape, draw.choice(LAYERS)) for shape in SHAPES]
    rest = draw.sample([place for place in places if place not in first], QUEUE_LENGTH - len(first))
    return [Entry("queues", name, shape, draw.choice(models), layers) for shape, layers in first + rest]


def modules() -> list[Entry]:
    """20 random modules over ``weft.nn``."""
    return [
        Entry("modules", "modules", MODULE_SHAPES[seed % len(MODULE_SHAPES)], f"random-{seed}", seed=seed)
        for seed in range(MODULES)
    ]


def opaque() -> list[Entry]:
    """PyG's models."""
    return [
        Entry("opaque", "opaque", OPAQUE_SHAPES[place % len(OPAQUE_SHAPES)], name)
        for place, name in enumerate(OPAQUE)
    ]  # fmt: skip


def users() -> list[Entry]:
    """Modules with torch's own norms, dropout and attention, all of which are stacked."""
    return [
        Entry("users", "users", USERS_SHAPES[place % len(USERS_SHAPES)], name) for place, name in enumerate(NAMES)
    ]  # fmt: skip


def entries(sets: list[str]) -> list[Entry]:
    """Everything in the named sets."""
    found: list[Entry] = []
    if "queues" in sets:
        found += [entry for name in QUEUES for entry in queue(name)]
    if "modules" in sets:
        found += modules()
    if "opaque" in sets:
        found += opaque()
    if "users" in sets:
        found += users()
    return found
