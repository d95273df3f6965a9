"""Plan a tuned sweep once, before its first trial: its stacks, how many rows they have, and what that takes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from inspect import signature
from itertools import accumulate
from typing import Any

from weft.core.errors import DoesNotFitError, SpecError
from weft.core.plan import Plan
from weft.core.run_options import MAX_MEMBERS, RunOptions
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.core.units import show_bytes
from weft.core.wording import option
from weft.engine.estimator import Estimate, Estimator
from weft.engine.optuna_tuner import OptunaTuner
from weft.planner.grouping.groups import plan_as_one_group
from weft.planner.grouping.limits import GroupLimits, fitting_size
from weft.planner.grouping.trials import TrialStack, check_tunable, each_kind, stack_for, trial_stacks
from weft.planner.tuning import BUILT_IN, Search, Tuner

APART = {  # options that a tuned run does not take, and why
    "prune": "the tuner ends trials",
    "weave": "the trials of a tuner share stacks as they are planned",
    "compile": "a compiled step holds numbers that a new trial would have to change",
    "batches": "trials begin at different epochs, and a loader makes batches for one training",
    "hardware": "it prepares sampled batches, and trials train on the whole graph",
}


def check_tuner(options: RunOptions, work: Any) -> list[Task]:
    """The kinds of trials of ``work``, one task each; a :class:`SpecError` for what a tuned run does not take."""
    given = options.given
    shown = option("tuner", options.tuner if isinstance(options.tuner, str) else None)
    if not isinstance(work, Sweep):
        raise SpecError(f"{shown} chooses trials out of a weft.Sweep, whose lists and ranges are the space")
    if options.trials is None:
        raise SpecError(f"{shown} needs {option('trials')}, how many trials there are in all")
    if options.ranks > 1:
        raise SpecError(f"{shown} does not go with {option('ranks', options.ranks)}: trials share one device")
    for name, reason in {**APART, **dict.fromkeys(options.placement.given, APART["hardware"])}.items():
        if name in given:
            raise SpecError(f"{shown} does not go with {option(name)}: {reason}; leave one of the two out")
    return check_tunable(work)


def tuner_of(options: RunOptions) -> Any:
    """The tuner: one of the built-in ones, as it is before its first call, the user's object, or one for a study."""
    tuner = options.tuner
    if isinstance(tuner, str):
        return Tuner.of(tuner)
    if not hasattr(tuner, "report"):
        return OptunaTuner(tuner)
    return deepcopy(tuner) if type(tuner) in BUILT_IN.values() else tuner


def description(tuner: Any) -> dict[str, Any]:
    """What a tuner is called and set to, as plain data."""
    names = signature(type(tuner)).parameters if isinstance(tuner, Tuner) else ()
    plain = {name: getattr(tuner, name, None) for name in names}
    return {"name": type(tuner).__name__, **{k: v for k, v in plain.items() if isinstance(v, (int, float, str))}}


class TrialPlanner:
    """Plans the rows of a tuned run of ``kinds`` of trials, and predicts what each needs of the ``room`` that there is.

    Wider trials of one structure need no less. Only kinds that fit by themselves are planned for.
    """

    def __init__(self, kinds: Sequence[Task], estimator: Estimator, room: int, options: RunOptions) -> None:
        self._estimator, self._room, self._options = estimator, room, options
        machine = estimator.machine
        self._limits = GroupLimits(estimator.stats(kinds[0]), machine.device, machine, budget=room)
        self._kinds = each_kind(kinds)
        alike: dict[Any, list[TrialStack]] = {}
        for kind in self._kinds:
            alike.setdefault(kind.key, []).append(kind)
        # A dry run takes 0.1 to 0.3 s: of a structure with very many widths only some are needed.
        few = [each[: bisect_right(each, room, key=self._bytes)] for each in alike.values()]
        names = {kind.widest.label for each in few for kind in each}
        self._fitting = [kind for kind in kinds if kind.label in names]
        if not self._fitting:
            need = min(self._bytes(each[0]) for each in alike.values())
            raise DoesNotFitError(
                f"no trial of this space fits: the smallest needs {show_bytes(need)} ({need:,} bytes) of "
                f"{show_bytes(room)}; give narrower models, or raise the budget"
            )

    def _bytes(self, kind: TrialStack) -> int:
        """Bytes of a trial by itself, with every number at its most."""
        most = self._limits.most_bytes([kind.widest])  # without a dry run
        built_in = kind.widest.traits is not None
        return most if built_in and most <= self._room else self._estimator.alone(kind.widest).cost.total_bytes

    @cached_property
    def stacks(self) -> list[TrialStack]:
        """The stacks, as many as there are rows at most, if padding makes them so few.

        Only one for a tuner that copies trials, whose rows must all fit each other.
        """
        rows = min(self._options.width or MAX_MEMBERS, self._options.trials or 1)
        copies = bool(getattr(tuner_of(self._options), "copies", False))
        stacks = trial_stacks(self._fitting, self._limits, together=copies)
        if not copies and len(stacks) > rows:
            stacks = trial_stacks(self._fitting, self._limits, together=True)
        if copies and len(stacks) > 1:
            raise SpecError(
                f"the tuner copies weights from one trial to another, and the space has {len(stacks)} structures or "
                "widths that cannot be padded; give one structure, or another tuner"
            )
        return stacks

    def rows(self, counts: Sequence[int]) -> list[Task]:
        """A task for every row of the stacks, of which each has as many as ``counts`` says.

        Rows of users' modules have seeds of their own: what depends on it besides the weights shows before training.
        """
        tasks = [stack.widest for stack, count in zip(self.stacks, counts, strict=True) for _ in range(count)]
        return [
            task.with_values(name=f"row-{row:03d}", seed=task.seed + row * (task.traits is None))
            for row, task in enumerate(tasks)
        ]

    def group(self) -> tuple[list[Task], Plan, Estimate]:
        """The rows as tasks, their plan with the reason for their number, and its estimate."""
        stacks, room, options, trials = self.stacks, self._room, self._options, self._options.trials or 1
        least = len(stacks)
        width = options.width or sum(fitting_size(stack.widest, self._limits).tasks for stack in stacks)
        width = min(width, MAX_MEMBERS, trials)
        if width < least:
            raise SpecError(
                f"the space has {least} structures, each with a stack of its own, and only {width} trials train at "
                f"once; give {option('width')} and {option('trials')} of at least {least}, or fewer structures"
            )
        while True:
            counts = [width // least + (index < width % least) for index in range(least)]
            tasks = self.rows(counts)
            plan = self._plan(tasks, counts)
            estimate = self._estimator.together(tasks, plan)
            need = estimate.cost.total_bytes
            if need <= room:
                break
            if options.width is not None or width == least:
                raise DoesNotFitError(
                    f"width={width} needs {show_bytes(need)} ({need:,} bytes) of {show_bytes(room)}; "
                    + ("give a lower width" if width > least else "train narrower models, or raise the budget")
                )
            width = max(least, min(width - 1, int(width * room / need)))
        longest, most = max(task.epochs for task in tasks), most_epochs(tasks, options)
        seconds = most * estimate.cost.epoch_seconds
        why = (
            f"tuned: {trials} trials by {description(tuner_of(options))['name']} in {width} row{'s' * (width > 1)} of "
            f"{least} stack{'s' * (least > 1)}, planned for the widest; at most {trials * longest:,} epochs of trials, "
            f"about {most:,} of the stacks and {seconds:.3g} s: trials that end early make room for others"
        )
        widths = tuple(dict.fromkeys(reason for stack in stacks for reason in stack.why))
        plan = replace(plan, why=(why, *widths, *plan.why), cost=estimate.cost.to_dict(), weights=estimate.weights)
        return tasks, plan, estimate

    def _plan(self, tasks: Sequence[Task], counts: Sequence[int]) -> Plan:
        """One group of ``tasks``, of which ``counts`` in turn are a stack each."""
        machine = self._estimator.machine
        plan = plan_as_one_group(tasks, self._estimator.stats(tasks[0]), machine.device, machine)
        ends = list(accumulate(counts))
        stacks = tuple(tuple(range(end - count, end)) for end, count in zip(ends, counts, strict=True))
        # As in sweeps, users' modules take turns: the load of their operators is not known.
        at_once = machine.device == "cuda" and all(task.traits is not None for task in tasks)
        several = "concurrent" if at_once else "in turn"
        join = several if len(stacks) > 1 else "stacked" if len(tasks) > 1 else "solo"
        plain = tuple(why for why in plan.why if "tasks stacked" not in why)  # of the rows, which are no tasks
        return replace(plan, join=join, stacks=stacks if len(stacks) > 1 else (), why=plain)

    def search(self, sweep: Sweep, tasks: Sequence[Task], metric: str, run: str) -> Search:
        """What the tuner of ``sweep`` chooses in; ``tasks``: the rows."""

        def need(settings: Any) -> int | None:
            with suppress(SpecError):
                return self._bytes(self._kinds[stack_for(sweep.trial(settings, "trial"), self._kinds)])
            return None

        epochs, trials = max(task.epochs for task in tasks), self._options.trials or 1
        return Search(sweep.space(), trials, epochs, len(tasks), metric, need, self._room, run)


def most_epochs(tasks: Sequence[Task], options: RunOptions) -> int:
    """Epochs of the rows ``tasks`` if no trial ended early."""
    return math.ceil((options.trials or 1) / len(tasks)) * max(task.epochs for task in tasks)
