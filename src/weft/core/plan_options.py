"""PlanOptions: what a user may ask of a plan beyond the tasks; None leaves it to the plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlanOptions:
    """``weave``: merge tasks of different structure into one step. ``compile``: send steps through Inductor."""

    weave: bool | None = None
    compile: bool | None = None
