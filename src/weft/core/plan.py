"""Plan: how a group of trainings will be run, with a reason per decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from weft.core.cost import RESOURCES, resource_kind
from weft.core.division import Division
from weft.core.errors import SpecError
from weft.core.graph_stats import GraphFingerprint
from weft.core.placement import DataPlacement, on_device
from weft.core.plain_data import PlainData
from weft.core.task import Task

# ---- Stage: one stage of a batch's way through a machine, and the resource it runs on.


@dataclass(frozen=True)
class Stage(PlainData):
    """``name`` says what is done, ``resource`` where (``"gpu"``, ``"cpu"``, ``"pcie"``, ..., or ``"gpu:1"``).

    ``depth``: how many batches may wait behind it (1: synchronous); ``workers``: how many work on it at once. Training
    on the full graph is one stage, ``"train"`` on the device: there is one batch and it never changes.
    """

    name: str
    resource: str
    depth: int = 1
    workers: int = 1

    def __post_init__(self) -> None:
        if resource_kind(self.resource) not in RESOURCES:
            raise SpecError(f"stage {self.name!r}: resource={self.resource!r} must be one of {', '.join(RESOURCES)}")
        for name, value in (("depth", self.depth), ("workers", self.workers)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise SpecError(f"stage {self.name!r}: {name}={value!r} must be a whole number, at least 1")


# Edges from which on a kernel fills a GPU by itself: on the arxiv shape (2.3 M) an H200 gained nothing from several
# stacks at once, on pubmed's (0.1 M) they were 1.4 times as fast as in turn.
FILLS_DEVICE = 1 << 20
WOVEN = ("woven", "woven+push")  # joins by merged steps
GAIN = 1.5  # how far seconds saved must exceed seconds spent: both are predicted


@dataclass(frozen=True)
class Plan(PlainData):
    """The decisions for one group of tasks on one graph.

    ``members``: names of the tasks. ``join``: how they share a step: ``"solo"`` (a group of one), ``"stacked"`` (one
    batched step for all), ``"concurrent"`` (several stacks at once, each on a stream of its own), ``"in turn"``
    (several stacks, an epoch of each after another's; sampled: a step of each on every batch), ``"woven"`` (several
    stacks in one merged step), ``"woven+push"`` (the same with pull-and-push). ``stacks``: the members of each stack as
    positions in ``members``; empty means one stack of all. ``device``: ``"cpu"`` or ``"cuda"``. ``replay``: capture the
    step once as a CUDA graph and replay it. ``first_layer``: ``"once"`` when the first layer's aggregation of the
    features is constant and computed before training, else ``"per_step"``. ``row_order``: the order in which a GPU
    traverses the rows of the graph, ``"by_length"`` or ``"clustered"``. ``compiled``: whether what lies between Weft's
    operators goes through Inductor. ``threads``: how many a CPU run may use, None for as many as torch has. ``cost``:
    the estimate for the group as plain data (:meth:`weft.core.cost.Cost.to_dict`), empty if none was made;
    ``measured``: what it then took: ``epoch_seconds`` with all members present, over how many ``epochs``, on a GPU
    ``peak_bytes`` and ``reserved_bytes``, on a CPU ``process_bytes``. ``why`` has one sentence per decision.

    ``division``: which batches the host prepares and which the device (None: one side all of them), and ``phases``
    the phase times that it was chosen by, as plain data (:meth:`weft.core.division.PhaseTimes.to_dict`). ``mode``:
    ``"full"``, training on the whole graph, or ``"sampled"``, and ``batch`` then the training nodes per step (what
    ``batch="fit"`` came to). ``placement``: where features and edges lie (not
    given: all on the device). ``stages``: the way of a batch (none given: one stage, ``"train"`` on the device).
    ``shards``: over how many devices the graph is split (1: not at all). ``budget``: bytes that it may take on the
    device; None is what is free there. ``graph``, ``weights`` and ``tasks`` make it executable elsewhere: the
    graph's fingerprint, a digest per stack of its parameters' names and shapes (empty where they are not known),
    and the members' settings (empty where they are kept apart from the plan, as in a run's folder).
    """

    members: tuple[str, ...]
    join: str = "solo"
    device: str = "cpu"
    replay: bool = False
    first_layer: str = "per_step"
    row_order: str = "by_length"
    compiled: bool = False
    threads: int | None = None
    why: tuple[str, ...] = ()
    stacks: tuple[tuple[int, ...], ...] = ()
    cost: Mapping[str, Any] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    mode: str = "full"
    batch: int | None = None
    placement: DataPlacement | None = None
    division: Division | None = None
    phases: Mapping[str, Any] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()
    shards: int = 1
    budget: int | None = None
    graph: GraphFingerprint | None = None
    weights: tuple[str, ...] = ()
    tasks: tuple[Task, ...] = ()

    def __post_init__(self) -> None:
        if not self.stages:
            object.__setattr__(self, "stages", ((Stage("train", "gpu" if self.device == "cuda" else "cpu"),)))
        if self.placement is None:
            object.__setattr__(self, "placement", on_device(self.device))

    @property
    def places(self) -> DataPlacement:
        """Where things lie."""
        return self.placement or on_device(self.device)

    @property
    def woven(self) -> bool:
        """Whether the steps of its stacks are merged into one."""
        return self.join in WOVEN

    @property
    def stack_members(self) -> tuple[tuple[int, ...], ...]:
        """The members of each stack as positions in ``members``, one stack of all unless given."""
        return self.stacks or (tuple(range(len(self.members))),)

    def halves(self) -> tuple[Plan, Plan]:
        """The same in two groups: some of the stacks each, or half of the only stack."""
        stacks = self.stack_members
        parts: list[tuple[tuple[int, ...], ...]]
        if len(stacks) == 1:
            members = stacks[0]
            parts = [(members[: len(members) // 2],), (members[len(members) // 2 :],)]
        else:
            parts = [stacks[: len(stacks) // 2], stacks[len(stacks) // 2 :]]
        first, second = (self._part(part) for part in parts)
        return first, second

    def _part(self, stacks: tuple[tuple[int, ...], ...]) -> Plan:
        """The plan for some of the stacks alone."""
        places = sorted(member for stack in stacks for member in stack)
        slot = {member: index for index, member in enumerate(places)}
        moved = tuple(tuple(slot[member] for member in stack) for stack in stacks)
        join = self.join if len(stacks) > 1 else "stacked" if len(places) > 1 else "solo"
        members = tuple(self.members[member] for member in places)
        tasks = tuple(self.tasks[member] for member in places) if self.tasks else ()
        stacks = moved if len(moved) > 1 else ()
        return replace(self, members=members, join=join, stacks=stacks, tasks=tasks, weights=(), cost={}, measured={})

    def __str__(self) -> str:
        names = ", ".join(self.members[:4]) + (", ..." if len(self.members) > 4 else "")
        count = f"{len(self.members)} tasks ({names})" if len(self.members) > 1 else names
        stacks = f" in {len(self.stacks)} stacks" if len(self.stacks) > 1 else ""
        head = f"{count}: {self.join}{stacks} on {self.device}"
        return "\n".join([head, *(f"  - {reason}" for reason in self.why)])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the members' settings are left out where the plan does not have them."""
        data = super().to_dict()
        tasks = [task.to_dict() for task in data.pop("tasks")]
        return {**data, "tasks": tasks} if tasks else data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The inverse of :meth:`to_dict`; unknown keys are ignored, so that older versions can read newer files."""
        return super().from_dict({**data, "tasks": map(read_task, data.get("tasks", ()))})


def read_task(data: Mapping[str, Any]) -> Task:
    """A task out of a plan; refuses one whose graph or model was an object, of which only a description is left."""
    for key in ("graph", "model"):
        if str(data.get(key)).startswith("<"):
            raise SpecError(object_obstacle(str(data.get("name") or data.get("model")), key, str(data[key])))
    return Task.from_dict(data)


def object_obstacle(task: str, key: str, what: str) -> str:
    """Why a task cannot be read back from a file."""
    names = "a name or a path (Graph.save makes one)" if key == "graph" else '"module:callable"'
    return (
        f"task {task!r}: its {key} {what} was given as an object, which a file cannot hold; give {names}, or hand the "
        "plan to weft.run where it was made"
    )
