"""Queues to simulate: CoGNN's five, and random ones of any length, with costs by rule of thumb for a named machine.

A queue of CoGNN has 20 trainings of one model (Mix: of all four), 4 to 10 layers of 64, 200 epochs, on the graphs of
its Table IV. Which of the 77 combinations a queue has is not published; they are drawn by seed, every graph at least
once. All tasks of such a queue arrive at time 0.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from weft.core.errors import SpecError
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.task import Task
from weft.planner.cost.rule_of_thumb import attention_bytes, memory, rates_of, work
from weft.sched.queue_state import QueuedTask

# CoGNN's Table IV: nodes, stored edges, features, classes.
_TABLE_IV = {
    "cora": (2_708, 10_858, 1_433, 7),
    "citeseer": (3_327, 9_464, 3_703, 6),
    "pubmed": (19_717, 88_676, 500, 3),
    "proteins": (43_471, 162_088, 29, 2),
    "artist": (50_515, 1_638_396, 100, 12),
    "soc-blog": (88_784, 2_093_195, 128, 39),
    "dd": (334_925, 1_686_092, 98, 2),
    "amazon0601": (410_236, 4_878_875, 96, 22),
    "twitter": (580_768, 1_435_116, 1_323, 2),
    "yeast": (1_714_644, 3_636_546, 74, 2),
    "ovcar-8h": (1_890_931, 3_946_402, 66, 2),
}
TABLE_IV: Mapping[str, tuple[int, int, int, int]] = MappingProxyType(_TABLE_IV)
PAPER_MODELS = ("gcn", "sage", "gat", "gin")
PAPER_QUEUES = (*PAPER_MODELS, "mix")
PAPER_LENGTH, PAPER_LAYERS, PAPER_EPOCHS, PAPER_HIDDEN = 20, range(4, 11), 200, 64


@dataclass(frozen=True)
class Mixture:
    """What random tasks are like: mean seconds between arrivals, and shares of the tasks that are special.

    A sweep of ``sweep_size`` tasks on average arrives at once and has one join key.
    """

    gap_seconds: float = 0.0
    sweep_size: float = 4.0
    users: int = 4
    deadlines: float = 0.05
    dependencies: float = 0.05
    inference: float = 0.02
    urgent: float = 0.1


def paper_queue(name: str, machine: Machine, epochs: int = PAPER_EPOCHS) -> list[QueuedTask]:
    """One of CoGNN's five queues (``"gcn"``, ``"sage"``, ``"gat"``, ``"gin"``, ``"mix"``) with estimated costs."""
    if name not in PAPER_QUEUES:
        raise SpecError(f"there is no queue {name!r}; choose one of {', '.join(PAPER_QUEUES)}")
    drawn = _draw(name)
    return [estimated(f"{i:02}-{m}-{n}-{graph}", graph, m, n, machine, epochs) for i, (graph, m, n) in enumerate(drawn)]


def random_queue(count: int, seed: int, machine: Machine, mixture: Mixture | None = None) -> list[QueuedTask]:
    """``count`` tasks in sweeps on the graphs of Table IV; the same for the same seed."""
    if count < 1:
        raise SpecError(f"tasks={count} must be at least 1")
    draw, mixture = random.Random(seed), mixture or Mixture()
    tasks: list[QueuedTask] = []
    arrival = 0.0
    while len(tasks) < count:
        size = min(1 + int(draw.expovariate(1.0 / max(mixture.sweep_size - 1.0, 1e-9))), count - len(tasks))
        first = _random_task(draw, arrival, mixture, machine)
        tasks += [_member(draw, first, len(tasks) + place, tasks, mixture) for place in range(size)]
        arrival += draw.expovariate(1.0 / mixture.gap_seconds) * size if mixture.gap_seconds else 0.0
    return tasks


def estimated(name: str, graph: str, model: str, layers: int, machine: Machine, epochs: int) -> QueuedTask:
    """A training with bytes, seconds and utilisation by rule of thumb: good to a factor of about two."""
    nodes, edges, features, classes = TABLE_IV[graph]
    stats = GraphStats(graph, nodes, edges, features, num_classes=classes)
    task = Task(graph=graph, model=model, layers=layers, hidden=PAPER_HIDDEN, heads=4, out_heads=4)
    rates = rates_of(machine.device, machine, task.precision)
    one = work(task, stats)
    busy, launching = one.seconds(rates), one.launches * rates.launch
    alone, two = (int(memory([task] * n, stats, machine.device) + attention_bytes([task] * n, stats)) for n in (1, 2))
    return QueuedTask(
        id=name,
        bytes=alone,
        seconds=epochs * (busy + launching),
        graph=graph,
        join_key=f"{graph}/{model}/{layers}",
        shared_bytes=max(2 * alone - two, 0),
        utilisation=busy / (busy + launching),
        turn_seconds=(busy + launching) / one.launches if machine.device == "cuda" else 0.0,
    )


def _draw(name: str) -> list[tuple[str, str, int]]:
    """Graph, model and layers of the 20 trainings of a queue."""
    draw = random.Random(f"queue {name}")
    models = PAPER_MODELS if name == "mix" else (name,)
    places = [(graph, layers) for graph in TABLE_IV for layers in PAPER_LAYERS]
    first = [(graph, draw.choice(PAPER_LAYERS)) for graph in TABLE_IV]
    rest = draw.sample([place for place in places if place not in first], PAPER_LENGTH - len(first))
    return [(graph, draw.choice(models), layers) for graph, layers in first + rest]


def _random_task(draw: random.Random, arrival: float, mixture: Mixture, machine: Machine) -> QueuedTask:
    graph, model = draw.choice(tuple(TABLE_IV)), draw.choice(PAPER_MODELS)
    epochs = draw.choice((50, 100, 200, 400))
    task = estimated("first", graph, model, draw.randint(2, 6), machine, epochs)
    user, priority = f"user-{draw.randrange(mixture.users)}", int(draw.random() < mixture.urgent)
    return replace(task, arrival=arrival, user=user, priority=priority)


def _member(
    draw: random.Random, first: QueuedTask, number: int, before: list[QueuedTask], mixture: Mixture
) -> QueuedTask:
    """A task of the sweep of ``first``, with something special about it now and then."""
    task = replace(first, id=f"task-{number:05}")
    chance = draw.random()
    if chance < mixture.deadlines:
        return replace(task, deadline=task.arrival + task.seconds * draw.uniform(4.0, 40.0))
    chance -= mixture.deadlines
    if chance < mixture.dependencies and before:
        return replace(task, after=(draw.choice(before).id,))
    if chance - mixture.dependencies < mixture.inference:
        seconds = task.seconds / PAPER_EPOCHS
        return replace(task, kind="inference", join_key="", seconds=seconds, latency_target=seconds * 20)
    return task
