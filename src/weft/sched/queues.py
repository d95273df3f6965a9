"""A recorded queue: tasks with their measured seconds, the device, and how tasks on it slow each other down; JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from weft.core.errors import SpecError
from weft.core.graph_stats import GraphStats
from weft.core.machine import Machine
from weft.core.task import Task
from weft.planner.cost.rule import attention_bytes, rates_of, rule_memory, work
from weft.sched.interference import Interference
from weft.sched.queue_state import DeviceState, QueuedTask
from weft.sched.simulator import Conditions


def mistake_in_queue(data: Any) -> str:
    """The first mistake in what a file holds; "" if there is none."""
    if not isinstance(data, dict):
        return f"it holds {_kind(data)}, not an object"
    for name in ("tasks", "device"):
        if name not in data:
            return f"it has no {name}"
    for name in ("tasks", "actual"):
        if not isinstance(data.get(name, []), list):
            return f"{name} is {_kind(data[name])}, not a list"
    parts = [("device", data["device"], DeviceState), ("interference", data.get("interference", {}), Interference)]
    for name in ("tasks", "actual"):
        parts += [(f"{name}[{number}]", task, QueuedTask) for number, task in enumerate(data.get(name, []))]
    if not _is_a("float", data.get("background", 0.0)):
        return f"background is {_kind(data['background'])}, not a number"
    return next((words for words in (_mistake_in(*part) for part in parts) if words), "")


def _mistake_in(where: str, data: Any, cls: Any) -> str:
    """Of one object: fields that it needs and has not, or that are of another kind."""
    if not isinstance(data, dict):
        return f"{where} is {_kind(data)}, not an object"
    by_name = {each.name: each for each in fields(cls)}
    needed = [name for name, f in by_name.items() if f.default is MISSING and f.default_factory is MISSING]
    missing = [name for name in needed if name not in data]
    if missing:
        return f"{where} has no {' and no '.join(missing)}"
    if cls is Interference and (unknown := sorted(set(data) - set(by_name))):
        return f"{where} has {unknown[0]}, which is not known; known are {', '.join(by_name)}"
    wrong = [name for name, each in by_name.items() if name in data and not _is_a(str(each.type), data[name])]
    return f"{where} has {_kind(data[wrong[0]])} for {wrong[0]}" if wrong else ""


def _is_a(kind: str, value: Any) -> bool:
    """Whether a value of JSON can stand for a field of this type."""
    if kind.endswith("| None"):
        return value is None or _is_a(kind.removesuffix("| None").strip(), value)
    if kind.startswith("tuple"):
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if kind in ("int", "float"):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, {"str": str, "bool": bool}[kind])


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number"}
    return names[type(value)]


@dataclass(frozen=True)
class RecordedQueue:
    """What the simulator needs to run a queue again under any policy.

    ``tasks`` are as predicted. ``actual``: those of them that turned out otherwise, as they were measured.
    """

    tasks: tuple[QueuedTask, ...]
    device: DeviceState
    conditions: Conditions = field(default_factory=Conditions)
    actual: tuple[QueuedTask, ...] = ()

    def on(self, budget: int | None, workers: int | None) -> RecordedQueue:
        """The same on a device with another budget or other workers."""
        budget = self.device.budget_bytes if budget is None else budget
        workers = self.device.workers if workers is None else workers
        return replace(self, device=replace(self.device, budget_bytes=budget, workers=workers))


def read_recorded(path: Path) -> RecordedQueue:
    """The queue of a file; a SpecError of one sentence if it holds none."""
    not_one = f"{path}: is not a recorded queue"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"{not_one}: there is no such file") from None
    except OSError as error:
        raise SpecError(f"{not_one}: it cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{not_one}: it holds no JSON ({error})") from None
    wrong = mistake_in_queue(data)
    if wrong:
        raise SpecError(f"{not_one}: {wrong}; such a file has tasks, a device and interference")
    try:
        interference = Interference(**data.get("interference", {}))
        return RecordedQueue(
            tasks=tuple(QueuedTask.from_dict(task) for task in data["tasks"]),
            device=DeviceState.from_dict(data["device"]),
            conditions=Conditions(interference, background=float(data.get("background", 0.0))),
            actual=tuple(QueuedTask.from_dict(task) for task in data.get("actual", ())),
        )
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


# ---- Queues to simulate: CoGNN's five, and random ones of any length, with costs by rule of thumb for a machine
#
# A queue of CoGNN has 20 trainings of one model (Mix: of all four), 4 to 10 layers of 64, 200 epochs, on the graphs of
# its Table IV. Which of the 77 combinations a queue has is not published; they are drawn by seed, every graph at least
# once. All tasks of such a queue arrive at time 0.

# CoGNN's Table IV: nodes, stored edges, features, classes.
TABLE_IV: Mapping[str, tuple[int, int, int, int]] = {
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
PAPER_MODELS = ("gcn", "sage", "gat", "gin")
PAPER_QUEUES = (*PAPER_MODELS, "mix")
PAPER_LENGTH, PAPER_LAYERS, PAPER_EPOCHS, PAPER_HIDDEN = 20, range(4, 11), 200, 64

# Fitted to 1,200 trainings of these queues on an H200, six at a time within 26 GiB (benchmarks/results/queues.json and
# queues_again.json), of so many epochs. With them the simulated mean completion times of six policies are off by 6 %.
MEASURED_EPOCHS: Mapping[str, int] = {"gcn": 40, "sage": 40, "gat": 10, "gin": 40, "mix": 20}
MEASURED_WORKERS = 6
OVER_RULE: Mapping[str, float] = {"gcn": 1.07, "sage": 1.16, "gat": 1.63, "gin": 0.93}  # seconds of training
START_SECONDS = 0.17  # the median of what a task takes besides its epochs, most of it on the host
START_EPOCHS = 1  # of which one epoch computes, before the step is captured
FITTED = Conditions(Interference(contention=0.025))  # the median of five fits to pairs of trainings, 0 to 0.2

# Random tasks come in sweeps, which arrive at once and have one join key. The shares are those of special tasks.
MEAN_SWEEP, USERS, URGENT = 4.0, 4, 0.1
DEADLINES, DEPENDENCIES, INFERENCE = 0.05, 0.05, 0.02


def paper_queue(name: str, machine: Machine, epochs: int | None = None) -> list[QueuedTask]:
    """One of CoGNN's five queues (``"gcn"``, ``"sage"``, ``"gat"``, ``"gin"``, ``"mix"``) with estimated costs.

    ``epochs``: of every task (None: those that the queue was measured with).
    """
    if name not in PAPER_QUEUES:
        raise SpecError(f"there is no queue {name!r}; choose one of {', '.join(PAPER_QUEUES)}")
    epochs = MEASURED_EPOCHS[name] if epochs is None else epochs
    draw = random.Random(f"queue {name}")
    models = PAPER_MODELS if name == "mix" else (name,)
    first = [(graph, draw.choice(PAPER_LAYERS)) for graph in TABLE_IV]
    combinations = [(graph, layers) for graph in TABLE_IV for layers in PAPER_LAYERS]
    rest = draw.sample([each for each in combinations if each not in first], PAPER_LENGTH - len(first))
    drawn = [(graph, draw.choice(models), layers) for graph, layers in first + rest]
    return [estimated(f"{i:02}-{m}-{n}-{graph}", graph, m, n, machine, epochs) for i, (graph, m, n) in enumerate(drawn)]


def random_queue(count: int, seed: int, machine: Machine, gap_seconds: float = 0.0) -> list[QueuedTask]:
    """``count`` tasks in sweeps on the graphs of Table IV; the same for the same seed.

    ``gap_seconds``: mean seconds between arrivals.
    """
    if count < 1:
        raise SpecError(f"tasks={count} must be at least 1")
    draw = random.Random(seed)
    tasks: list[QueuedTask] = []
    arrival = 0.0
    while len(tasks) < count:
        size = min(1 + int(draw.expovariate(1.0 / (MEAN_SWEEP - 1.0))), count - len(tasks))
        graph, model = draw.choice(tuple(TABLE_IV)), draw.choice(PAPER_MODELS)
        epochs = draw.choice((50, 100, 200, 400))
        first = estimated("first", graph, model, draw.randint(2, 6), machine, epochs)
        user, priority = f"user-{draw.randrange(USERS)}", int(draw.random() < URGENT)
        first = replace(first, arrival=arrival, user=user, priority=priority)
        tasks += [_member(draw, first, len(tasks) + number, tasks) for number in range(size)]
        arrival += draw.expovariate(1.0 / gap_seconds) * size if gap_seconds else 0.0
    return tasks


def estimated(name: str, graph: str, model: str, layers: int, machine: Machine, epochs: int) -> QueuedTask:
    """A training with bytes, seconds and utilisation by rule of thumb, corrected by what was measured on an H200."""
    nodes, edges, features, classes = TABLE_IV[graph]
    stats = GraphStats(graph, nodes, edges, features, num_classes=classes)
    task = Task(graph=graph, model=model, layers=layers, hidden=PAPER_HIDDEN, heads=4, out_heads=4)
    rates = rates_of(machine.device, machine, task.precision)
    epoch = work(task, stats)
    busy, launching = (OVER_RULE[model] * part for part in (epoch.seconds(rates), epoch.launches * rates.launch))
    whole, work_seconds = START_SECONDS + epochs * (busy + launching), (epochs + START_EPOCHS) * busy
    alone, two = (
        int(rule_memory([task] * n, stats, machine.device) + attention_bytes([task] * n, stats)) for n in (1, 2)
    )
    return QueuedTask(
        id=name,
        bytes=alone,
        seconds=whole,
        graph=graph,
        join_key=f"{graph}/{model}/{layers}",
        shared_bytes=max(2 * alone - two, 0),
        utilisation=min(work_seconds / whole, 1.0),
        start_seconds=START_SECONDS,
        turn_seconds=(busy + launching) / epoch.launches if machine.device == "cuda" else 0.0,
    )


def _member(draw: random.Random, first: QueuedTask, number: int, before: list[QueuedTask]) -> QueuedTask:
    """A task of the sweep of ``first``, with something special about it now and then."""
    task = replace(first, id=f"task-{number:05}")
    chance = draw.random()
    if chance < DEADLINES:
        return replace(task, deadline=task.arrival + task.seconds * draw.uniform(4.0, 40.0))
    chance -= DEADLINES
    if chance < DEPENDENCIES and before:
        return replace(task, after=(draw.choice(before).id,))
    if chance - DEPENDENCIES < INFERENCE:
        seconds, share = (task.seconds - task.start_seconds) / PAPER_EPOCHS, task.work / (task.seconds - START_SECONDS)
        alone = replace(task, start_seconds=0.0, utilisation=min(share, 1.0), join_key="", seconds=seconds)
        return replace(alone, kind="inference", latency_target=seconds * 20)
    return task
