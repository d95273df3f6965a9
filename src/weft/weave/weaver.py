"""Weaver: merges the steps of a group's stacks, behind the runtime's StepMerger interface."""

from __future__ import annotations

from collections.abc import Sequence

from weft.capture.observer import Observer
from weft.runtime.step.stack import Stack
from weft.weave.costs import register
from weft.weave.dry_run import dry_run_woven
from weft.weave.step import WovenStep


class Weaver:
    """Makes merged steps, and reports them to a dry run. See :class:`weft.runtime.group_step.StepMerger`."""

    def merge(self, stacks: Sequence[Stack]) -> WovenStep:
        """The checked merged step of ``stacks``; raises InputError if they cannot be merged."""
        step = WovenStep(stacks)
        step.check()
        return step

    def observe(self, step: WovenStep, observer: Observer, streams: bool) -> None:
        """Report the operators of ``step`` to ``observer`` from its next call on."""
        register()
        dry_run_woven(step, observer, streams)
