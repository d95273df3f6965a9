"""JobOptions: what a job is told besides its tasks and its device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from weft.core.plan import PlanOptions
from weft.engine.control import Control
from weft.engine.driver import DriverOptions
from weft.planner.report.plan_report import PlanReport


@dataclass(frozen=True)
class JobOptions:
    """Options of a job: the driver's, the control, the byte budget, the planner's, and a plan to run."""

    driver: DriverOptions = field(default_factory=DriverOptions)
    control: Control = field(default_factory=Control)
    budget: int | None = None
    plan_options: PlanOptions = field(default_factory=PlanOptions)
    report: PlanReport | None = None  # the groups to train, where they are planned already
    batches: Any = None  # a loader that makes the batches, in place of Weft's sampler
    hardware: Any = None  # who prepares batches beside the host (weft.batches.Hardware); None: the GPU
