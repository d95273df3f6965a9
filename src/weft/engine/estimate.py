"""``weft.estimate``: will it fit? What one training takes, on any machine, as a few numbers of its plan."""

from __future__ import annotations

import inspect
import os
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from weft.core.errors import SpecError
from weft.core.task import SAMPLING_SETTINGS, Task, with_own_names
from weft.core.units import parse_bytes, show_bytes, show_seconds
from weft.engine.machine import Given, find_machine
from weft.engine.memory import KERNELS, PROCESS
from weft.engine.plan import plan
from weft.graph.catalog import names as catalog
from weft.planner.machine_profiles import PROFILES
from weft.planner.report.plan_report import PlanReport
from weft.planner.report.plan_text import KINDS, refusal


@dataclass(frozen=True)
class Fit:
    """Whether a training keeps within the memory of a machine: true or false, and ``reason`` says why.

    ``report`` is its plan there, None if not even its weights fit.
    """

    reason: str
    report: PlanReport | None = field(default=None, repr=False)

    def __bool__(self) -> bool:
        return self.report is not None and self.report.fits

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, repr=False)
class TrainingEstimate:
    """What one training takes on the machine of ``report``, its plan; ``print`` shows the named machines beside it.

    ``peak_bytes``: the most that its tensors are expected to take at once (``torch.cuda.max_memory_allocated``), and
    ``breakdown`` the same by kind, the largest first. ``bound_bytes``: what the device must have, a margin and CUDA's
    libraries included, by which :meth:`fits` decides. ``seconds_per_epoch``: expected.
    """

    task: Task
    report: PlanReport
    peak_bytes: int
    bound_bytes: int
    seconds_per_epoch: float
    breakdown: dict[str, int]

    def fits(self, machine: Given = None, budget: str | float | None = None) -> Fit:
        """Whether it fits into the memory of ``machine``, or into ``budget`` there; None: the machine it is for."""
        there = self.report.machine if machine is None else find_machine(machine)
        budget = None if budget is None else parse_bytes(budget)
        try:
            same = there == self.report.machine and budget is None
            report = self.report if same else plan(self.task, there, budget=budget)
        except SpecError as error:  # not even its weights fit: the task itself has been planned before
            return Fit(str(error))
        needs = f"{show_bytes(report.peak_bytes)} of {show_bytes(report.budget)} on {there.name}: fits"
        return Fit(f"task {self.task.label!r} needs {needs}" if report.fits else refusal(report), report)

    def __repr__(self) -> str:
        sizes = f"peak {show_bytes(self.peak_bytes)}, bound {show_bytes(self.bound_bytes)}"
        return f"<TrainingEstimate {self.task.label!r} on {self.report.machine.name}: {sizes}>"

    def __str__(self) -> str:
        here = self.report.machine
        kinds = ", ".join(f"{kind} {show_bytes(size)}" for kind, size in self.breakdown.items())
        rows = [("machine", "memory", "expected", "bound", "epoch", "fits")]
        for machine in (here, *(other for other in PROFILES.values() if other.name != here.name)):
            fit, numbers = self.fits(machine), ("-", "-", "-")
            if fit.report is not None:
                cost = fit.report.groups[0].cost
                numbers = (show_bytes(cost.peak_bytes), show_bytes(cost.total_bytes), show_seconds(cost.epoch_seconds))
            rows.append((machine.name, show_bytes(machine.memory_bytes), *numbers, "yes" if fit else "no"))
        head = [f"{self.task.label} on {self.report.graphs[0]}", f"peak {show_bytes(self.peak_bytes)}: {kinds}", ""]
        table = [f"{name:<12}" + "".join(f"{cell:>11}" for cell in cells) for name, *cells in rows]
        return "\n".join([*head, *table])


def estimate(
    module: Any, data: Any, optimizer: Any = "adam", loss: Any = None, *, machine: Given = None, **settings: Any
) -> TrainingEstimate:
    """What training ``module`` on ``data`` takes: memory, time, and on which machine it fits. Needs no GPU.

    ``module``: an ``nn.Module``, a class or function that makes one, or the name of a model. ``data``: a
    :class:`weft.Graph`, a ``Data`` of PyG, a name or a path. ``optimizer``: a name, a class of ``torch.optim``, or an
    optimizer, whose settings count. ``loss``: an objective of :class:`weft.Task`; None: that of the labels.
    ``machine``: as of :func:`weft.plan`; None is the one at hand. ``settings``: others of :class:`weft.Task`, such as
    ``batch=1024, fanout=[15, 10]`` for sampled training; without these it is training on the whole graph.
    """
    if isinstance(data, (str, os.PathLike)) and not str(data).startswith("shape:"):
        data = catalog.load(data)  # once for all machines
    if hasattr(optimizer, "param_groups"):  # an optimizer: its class, with what it was made with
        takes = inspect.signature(type(optimizer)).parameters
        given = {name: value for name, value in optimizer.defaults.items() if name in takes}
        optimizer = partial(type(optimizer), **given)
    settings = with_own_names(settings, "estimate")
    settings = {"mode": "sampled" if settings.keys() & SAMPLING_SETTINGS else "full", **settings}
    objective = {} if loss is None else {"objective": loss}
    task = Task(graph=data, model=module, optimizer=optimizer, **objective, **settings)
    report = plan(task, machine)
    cost = report.groups[0].cost
    kinds = {KINDS.get(kind, kind): size for kind, size in sorted(cost.bytes.items(), key=lambda part: -part[1])}
    return TrainingEstimate(task, report, cost.peak_bytes, cost.total_bytes, cost.epoch_seconds, kinds)


READ_TWICE = 2  # a graph while it is read: what the file holds, and the arrays that are made of it


def host_bytes(report: PlanReport) -> int:
    """Bytes of host memory that a run of ``report`` takes: of its process, and to read the largest of its graphs."""
    if report.machine.device == "cpu":
        return max(group.cost.process_bytes for group in report.groups)
    graphs = [group.plan.graph for group in report.groups if group.plan.graph is not None]
    return PROCESS + KERNELS + max(READ_TWICE * (4 * g.num_nodes * g.num_features + 8 * g.num_edges) for g in graphs)
