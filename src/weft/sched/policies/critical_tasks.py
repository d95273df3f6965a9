"""Find the task that must start now for the queue to end early, though shorter ones wait.

Shortest first leaves the long and the large tasks for the end, where nothing is left that could run beside them: what
they leave idle of the device, while they start above all, is lost. Two rules find the last moment to begin with them.
A chain of large tasks lets a shorter one go first if that costs the chain less than the shorter one would lose beside
it, where its short kernels wait behind long ones.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from weft.sched.admission import needed_bytes
from weft.sched.interference import Interference, Load
from weft.sched.policies.device_plan import DevicePlan, training_workers
from weft.sched.queue_state import QueuedTask
from weft.sched.task_queue import TaskQueue

LONGEST = "is the longest, and the rest of the queue only just fills the device beside it"
CHAIN = "is of those that fit beside none of each other, and take as long as the rest of the queue"
MARGIN = 1.5  # begin with a chain while the rest is up to that much longer: predictions are not exact
MOST_LARGE = 32  # tasks of a chain that are looked at


def critical_task(
    queue: TaskQueue, plans: Sequence[DevicePlan], refused: Collection[str], safety: float
) -> tuple[QueuedTask, str] | None:
    """The task that must start now, with the reason; None if the order of the queue will do."""
    if not queue.longest_first or sum(training_workers(plan.device) for plan in plans) < 2:
        return None  # nothing could run beside it
    urgent = max(priority for _, priority, _ in queue.lanes)
    longest = queue[queue.longest_first[0]]
    if longest.id not in refused and longest.priority >= urgent and _is_critical(longest, queue, plans):
        return longest, LONGEST
    large = _next_of_chain(queue, plans, refused, safety)
    return (large, CHAIN) if large is not None and large.priority >= urgent else None


def _is_critical(longest: QueuedTask, queue: TaskQueue, plans: Sequence[DevicePlan]) -> bool:
    """Whether ``longest`` must start now.

    Alone it leaves a share of the device idle, ``(1 - utilisation) * seconds``. Once the rest of the queue is no more
    than that, starting it later makes the queue end later.
    """
    running = sum(min(plan.demand, 1.0) * plan.busy_seconds for plan in plans)
    rest = (queue.ready_work - longest.work + running) / len(plans)
    return longest.seconds - longest.work >= rest


def _next_of_chain(
    queue: TaskQueue, plans: Sequence[DevicePlan], refused: Collection[str], safety: float
) -> QueuedTask | None:
    """The shortest of the tasks that can only run one after another, if they must begin now.

    They must if the rest, beside them, has no more work than they leave idle and takes no longer on the other workers.
    """
    plan = max(plans, key=lambda one: one.device.task_bytes)
    workers = sum(training_workers(one.device) for one in plans) - 1
    chain = _chain(queue, plan.device.task_bytes, refused, safety)
    if len(chain) < 2 or workers < 1:
        return None
    smallest = needed_bytes(chain[-1].bytes, safety)
    if any(one.bytes + smallest > plan.device.task_bytes for one in plan.occupants):
        return None  # one of them, or as large, runs
    seconds, work = sum(task.seconds for task in chain), sum(task.work for task in chain)
    left = [(max(one.ends - plan.now, 0.0), min(one.load.demand, 1.0)) for each in plans for one in each.occupants]
    other_seconds = queue.ready_seconds - seconds + sum(ends for ends, _ in left)
    other_work = queue.ready_work - work + sum(ends * demand for ends, demand in left)
    if other_seconds / workers > MARGIN * seconds or other_work / len(plans) > MARGIN * (seconds - work):
        return None
    if _loses_beside(queue[queue.longest_first[-1]], chain, plan.model):
        return None
    fitting = [task for task in chain if needed_bytes(task.bytes, safety) <= plan.free]
    return min(fitting, key=lambda task: task.seconds, default=None)


def _chain(queue: TaskQueue, room: int, refused: Collection[str], safety: float) -> list[QueuedTask]:
    """The largest tasks of which no two fit into ``room`` bytes together, largest first."""
    found: list[QueuedTask] = []
    for name in reversed(queue.by_bytes):
        task = queue[name]
        if name in refused:
            continue
        if found and needed_bytes(task.bytes, safety) + needed_bytes(found[-1].bytes, safety) <= room:
            break
        found.append(task)
        if len(found) == MOST_LARGE:
            break
    return found


def _loses_beside(shortest: QueuedTask, chain: Sequence[QueuedTask], model: Interference) -> bool:
    """Whether ``shortest`` would lose more time beside the chain than all of the chain would if it went first.

    Beside a large task it trains as slowly as their turns have it, at worst until that one has ended. Before the chain
    it delays every task of it by its own training.
    """
    training = shortest.seconds - shortest.start_seconds
    beside = min(chain, key=lambda task: task.seconds)
    slowdown = model.slowdown(load_of(shortest), [load_of(beside)])
    lost = min((slowdown - 1.0) * training, beside.seconds - beside.start_seconds)
    return lost > len(chain) * training


def load_of(task: QueuedTask) -> Load:
    """What a task asks of a device once it has started."""
    return Load(task.demand, task.turn_seconds)
