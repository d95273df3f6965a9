"""Check the arguments of ``weft.run`` before anything is read or written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from weft.core.errors import SpecError
from weft.core.task import Task
from weft.core.wording import option, switch
from weft.engine.control import Cancel, Control


def check_options(*, out: Any, resume: Any, overwrite: Any, on_event: Any, checkpoint_every: Any) -> None:
    """A :class:`SpecError` for the first option that cannot be what it should be."""
    if out is not None and not isinstance(out, (str, os.PathLike)):
        raise SpecError(f"out={out!r} must be a folder, such as out='runs/first'")
    if resume and out is None:
        raise SpecError("resume=True needs out=, the folder that has the checkpoint")
    if resume and overwrite:
        what = f"{switch('resume')} continues the run in {option('out')}, {switch('overwrite')} deletes it"
        raise SpecError(f"{what}; choose one of the two")
    if on_event is not None and not callable(on_event):
        raise SpecError(f"on_event={on_event!r} must be a function that takes a weft.Event")
    if isinstance(checkpoint_every, bool) or not isinstance(checkpoint_every, Real) or not checkpoint_every >= 0:
        raise SpecError(f"checkpoint_every={checkpoint_every!r} must be a number of seconds, at least 0")


def check_handles(control: Any, cancel: Any) -> Control | None:
    """The handle that a run is given to be steered by, under whichever name; None if there is none."""
    if cancel is not None and not isinstance(cancel, Cancel):
        raise SpecError(f"cancel={cancel!r} must be a weft.Cancel()")
    if control is not None and not isinstance(control, Control):
        raise SpecError(f"control={control!r} must be a weft.Control()")
    if cancel is not None and control is not None and cancel is not control:
        raise SpecError("control= and cancel= are two handles for one run; control.cancel(...) does what cancel does")
    handle: Control | None = control if control is not None else cancel
    return handle


def check_hardware(hardware: Any, tasks: Sequence[Task], batches: Any, ranks: Any) -> None:
    """A :class:`SpecError` for hardware that cannot prepare batches, or has none to prepare."""
    if hardware is None:
        return
    missing = [name for name in ("name", "registry", "preparers") if not hasattr(hardware, name)]
    if missing:
        raise SpecError(f"hardware={hardware!r} has no {missing[0]!r}; it needs name, registry() and preparers(parts)")
    if ranks != 1 or batches is not None:
        raise SpecError("hardware= prepares batches of Weft's own sampler, in a run in one process")
    if not any(task.sampled for task in tasks):
        raise SpecError(f"task {tasks[0].label!r}: hardware= would have no effect; only mode='sampled' has batches")


def check_batches(batches: Any, tasks: Sequence[Task], resume: bool, ranks: Any) -> None:
    """A :class:`SpecError` for a loader's batches where they cannot be used, or with settings that none would read."""
    if batches is None:
        return
    if ranks != 1:
        raise SpecError(f"ranks={ranks}: batches= are for a run in one process; a sharded graph is not sampled")
    if resume:
        raise SpecError("resume=True: batches= comes from a loader, whose batches cannot be made again; start afresh")
    for task in tasks:
        if not task.sampled or task.fanout is None:
            raise SpecError(
                f"task {task.label!r}: batches= needs mode='sampled' with the loader's own fanout and batch"
            )
        for name in ("batch_seed", "feature_norm"):
            if name in task.given:
                raise SpecError(f"task {task.label!r}: {name} has no effect on batches=, which the loader makes")


def check_choices(**choices: Any) -> None:
    """A :class:`SpecError` for anything but yes, no and undecided."""
    for name, choice in choices.items():
        if choice is not None and not isinstance(choice, bool):
            raise SpecError(f"{name}={choice!r} must be True, False or None, which leaves it to the plan")


def check_ranks(
    ranks: Any, weave: bool | None, compile: bool | None, planned: bool, order: str = "given", peers: str = "auto"
) -> int:
    """The number of ranks, checked against what ranks cannot do; ``order`` of the nodes, ``peers``: their memory."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise SpecError(f"ranks={ranks!r} must be a whole number, at least 1")
    if order != "given" and ranks == 1:
        from weft.dist.node_order import check_order

        check_order(order)
        raise SpecError(f"order={order!r} is of use over several ranks only; give ranks=2 or more, or leave it out")
    if peers != "auto" and ranks == 1:
        raise SpecError(f"peers={peers!r} is of use over several ranks only; give ranks=2 or more, or leave it out")
    if ranks == 1:
        return 1
    if planned:
        raise SpecError(f"ranks={ranks}: a plan that was written for one device runs on one rank; give the spec itself")
    for name, choice in (("weave", weave), ("compile", compile)):
        if choice:
            raise SpecError(f"{name}=True does not go with ranks={ranks}: ranks wait for each other inside of a step")
    return ranks


def check_places_over_ranks(places: Mapping[str, Any], ranks: int) -> None:
    """A :class:`SpecError` for places of features and edges over ranks, each of which has its shard in its memory."""
    given = [name for name, choice in places.items() if choice is not None]
    if given and ranks > 1:
        raise SpecError(
            f"{given[0]}={places[given[0]]!r} does not go with ranks={ranks}: every rank has its part of the graph in "
            "its own memory; leave it out"
        )


def check_extend(extend: Any, out: Any, overwrite: bool, planned: bool, ranks: Any) -> None:
    """What does not go with extending the run in a folder."""
    if not isinstance(extend, bool):
        raise SpecError(f"extend={extend!r} must be True or False")
    if not extend:
        return
    if out is None:
        raise SpecError(f"{switch('extend')} needs {option('out')}, the folder of the run to extend")
    if overwrite:
        raise SpecError(f"{switch('extend')} and {switch('overwrite')}: give one of the two")
    if planned:
        raise SpecError(f"{switch('extend')}: a plan is run as it is; give the task or sweep itself")
    if ranks != 1:
        raise SpecError(f"{switch('extend')} trains on one rank, not on ranks={ranks}")


def check_splits(tasks: Sequence[Task], ranks: int) -> None:
    """A :class:`SpecError` for one of several splits over ranks: shards have the graph's first alone."""
    for task in tasks:
        if ranks > 1 and task.split:
            raise SpecError(
                f"task {task.label!r}: split={task.split} trains on one rank, not on ranks={ranks}; give the graph "
                f"with that split alone, graph.split({task.split})"
            )


def check_relations(tasks: Sequence[Task], ranks: int) -> None:
    """A :class:`SpecError` for a model that reads relations over several ranks: shards do not hold them."""
    for task in tasks:
        if ranks > 1 and task.traits is not None and task.traits.relational:
            raise SpecError(
                f"task {task.label!r}: {task.model} trains on one rank, not on ranks={ranks}: shards have no relations"
            )


def not_work(work: Any, caller: str) -> SpecError:
    """The complaint about something that is neither a task nor tasks."""
    if isinstance(work, (list, tuple)):
        wrong = [(place, item) for place, item in enumerate(work) if not isinstance(item, Task)]
        what = f"a list whose item {wrong[0][0]} is {wrong[0][1]!r}" if wrong else "an empty list"
    else:
        what = repr(work)
    return SpecError(
        f"{caller} takes a weft.Task, a weft.Sweep or a list of tasks, not {what}; weft.Task(graph=..., ...)"
    )
