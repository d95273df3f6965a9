"""Policies to compare with: CoGNN's three, one task after another (also like PipeSwitch), and plain MPS.

CoGNN packs the next task group in some order, and starts it when the last one is done. :class:`Base` takes tasks first
in, first out, :class:`LMCF` the lowest memory consumption first, :class:`BMC` (its Algorithm 1) small and large tasks
in turn, for groups of balanced memory consumption. All of them may fuse (``fuse``): a task then takes those that can be
fused with it along, so that each worker of a task group trains several. A sharded task is a task group of its own, on
several devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import ClassVar

from weft.sched.admission import SAFETY_THRESHOLD, Tasks, needed_bytes, rank_places, refusals
from weft.sched.device_plan import JOIN_AT_LEAST, MAX_MEMBERS, DevicePlan, Footprint, GroupDraft, join_alike
from weft.sched.interference import Interference
from weft.sched.queue_state import DeviceState, GroupStart, MachineState, QueueDecision, QueuedTask, RunningGroup
from weft.sched.task_queue import TaskQueue


@dataclass(frozen=True)
class Base:
    """Tasks in order of arrival, as many per group as memory and workers allow; one group after another.

    ``fuse``: whether a task starts with those that can be fused with it, as far as memory allows.
    ``strict``: a second task may not fill the memory to the last byte (Algorithm 1 advances if the sum is >= MA).
    ``one_at_a_time``: one task per device, of either kind; a device has at least one worker that is not kept for
    inference.
    """

    safety: float = SAFETY_THRESHOLD
    fuse: bool = False
    strict: ClassVar[bool] = False
    one_at_a_time: ClassVar[bool] = False

    def order(self, queue: TaskQueue, machine: MachineState) -> Iterable[str]:
        """The ready tasks in the order in which they start."""
        return queue.by_arrival

    def schedule(self, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> QueueDecision:
        """Start the next task group on each device on which nothing runs: the longest run of tasks that it takes."""
        queue = TaskQueue.of(tasks, running)
        refuse = refusals(queue, machine, self.safety)
        gone = set(refuse)
        pending = (queue[name] for name in self.order(queue, machine) if name not in gone)
        task, busy = next(pending, None), {name for group in running for name in group.places}
        waits, starts = len(busy) == len(machine.devices), list[GroupStart]()

        def takes(needed: int, device: DeviceState, count: int) -> bool:
            return device.name not in busy and count * needed <= device.task_bytes

        for device in machine.devices:
            while task is not None and task.ranks > 1:  # it starts once enough devices are idle, and what follows waits
                needed = needed_bytes(task.bytes, self.safety)
                places = rank_places(task.ranks, machine.devices, partial(takes, needed))
                if not places:
                    break
                busy.update(places)
                draft = _with_alike(task, queue, gone, False, self.safety, 0, machine.now)
                starts.append(draft.start(places, "its ranks are a task group", machine.now))
                task = next(pending, None)
            if device.name in busy or (task is not None and task.ranks > 1):
                continue
            group, free = list[GroupDraft](), device.task_bytes
            workers, trainings = (1, 1) if self.one_at_a_time else (device.workers, device.training_workers)
            while task is not None and task.ranks == 1 and len(group) < workers:
                taken = needed_bytes(task.bytes, self.safety)
                trainings -= task.kind == "training"
                full = self.strict and bool(group) and taken >= free
                if taken > free or trainings < 0 or full:
                    break
                group.append(_with_alike(task, queue, gone, self.fuse, self.safety, free, machine.now))
                free -= group[-1].footprint(machine.now).bytes
                busy.add(device.name)
                task = next(pending, None)
            why = "alone in its task group" if len(group) == 1 else f"one of {len(group)} tasks of the next task group"
            why = "is next, and has the device to itself" if self.one_at_a_time else why
            starts += [draft.start((device.name,), why, machine.now) for draft in group]
        rest = "waits until every task of the running task group is done" if waits else "is in a later task group"
        rest = "waits for the tasks before it; one task runs at a time" if self.one_at_a_time else rest
        return QueueDecision(tuple(starts), refuse=refuse, rest=rest)


def _with_alike(
    task: QueuedTask, queue: TaskQueue, gone: set[str], fuse: bool, safety: float, free: float, now: float
) -> GroupDraft:
    """A group of ``task``, if ``fuse`` with those that can be fused with it and fit into ``free`` bytes.

    Its members are added to ``gone``.
    """
    draft = GroupDraft(safety, Interference())
    draft.add(task)

    def accepts(group: Footprint) -> bool:
        count = len(draft.members)
        return group.bytes <= free and count < (MAX_MEMBERS if group.load.demand <= 1.0 else JOIN_AT_LEAST)

    if fuse:
        join_alike(draft, queue, gone, accepts, now)
    gone.update(member.id for member in draft.members)
    return draft


class BMC(Base):
    """Tasks from both ends of the queue in ascending order of memory, packed into groups.

    Algorithm 1 pops the ``i``-th task from the left (smallest) if ``i`` is even and from the right (largest) if odd,
    where ``i`` counts over all groups. The number of tasks started so far is that ``i``, so the groups of successive
    calls are those of one run of the algorithm.
    """

    strict = True

    def order(self, queue: TaskQueue, machine: MachineState) -> Iterator[str]:
        """The tasks alternately from the left and the right end."""
        left, right = 0, len(queue.by_bytes) - 1
        for number in range(machine.started, machine.started + len(queue.by_bytes)):
            yield queue.by_bytes[right if number % 2 == 1 else left]
            left, right = left + (number % 2 == 0), right - (number % 2 == 1)


class LMCF(Base):
    """Tasks in ascending order of predicted memory, packed into groups that run one after another.

    Memory stands in for time: larger graphs take more of both, so small tasks do not wait for large ones.
    """

    def order(self, queue: TaskQueue, machine: MachineState) -> Iterable[str]:
        """The smallest task first."""
        return queue.by_bytes


class Sequential(Base):
    """First in, first out, one task per device."""

    one_at_a_time = True


class PipeSwitchLike(Sequential):
    """Temporal sharing: inference tasks first, then first in, first out, one task per device.

    Unlike PipeSwitch it does not interrupt a running training for an inference task.
    """

    def order(self, queue: TaskQueue, machine: MachineState) -> Iterable[str]:
        """Inference tasks, then the others."""
        urgent = dict.fromkeys(queue.inference)
        return chain(urgent, (name for name in queue.by_arrival if name not in urgent))


@dataclass(frozen=True)
class MPSNoAdmission:
    """First in, first out onto every free worker, without the safety condition.

    The only policy that may exceed the memory budget and that refuses nothing: the device then pages. Workers that are
    kept for inference take the oldest inference tasks, also past trainings that wait.
    """

    fuse: bool = False

    def schedule(self, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> QueueDecision:
        """Start the oldest tasks on all free workers."""
        queue, model = TaskQueue.of(tasks, running), Interference()
        plans = {device.name: DevicePlan.of(device, running, machine.now, model) for device in machine.devices}
        starts, gone, passed = list[GroupStart](), set[str](), False

        def takes(inference: bool, device: DeviceState, ranks: int) -> bool:
            return plans[device.name].has_worker(inference, workers=device.workers_for(ranks))

        for name in queue.by_arrival:
            if name in gone:
                continue
            task = queue[name]
            inference = task.kind == "inference"
            trains = not passed and any(takes(False, device, 1) for device in machine.devices)
            if not trains and not (queue.inference and any(takes(True, device, 1) for device in machine.devices)):
                break
            in_turn = sorted(machine.devices, key=lambda device: plans[device.name].busy_workers)
            places = rank_places(task.ranks, in_turn, partial(takes, inference)) if inference or trains else ()
            if places:
                draft = _with_alike(task, queue, gone, self.fuse, 1.0, math.inf, machine.now)
                for place, ranks in Counter(places).items():
                    plans[place].start(draft.footprint(machine.now).of_ranks(ranks, plans[place].device))
                starts.append(draft.start(places, "a worker is free; memory is not checked", machine.now))
            passed = passed or (task.ranks > 1 and not places)  # trainings behind a sharded one wait for it
        return QueueDecision(tuple(starts), rest="waits for a free worker")
