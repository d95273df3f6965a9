"""Weaver: what a group is handed so that its stacks train as one merged step."""

from __future__ import annotations

from collections.abc import Sequence

from weft.capture.observer import Observer
from weft.runtime.step.stack import Stack
from weft.weave.costs import register
from weft.weave.dry_run import dry_run_woven
from weft.weave.step import WovenStep


class Weaver:
    """Makes merged steps, and lets a dry run see what they do. See :class:`weft.runtime.group.StepMerger`."""

    def merge(self, stacks: Sequence[Stack]) -> WovenStep:
        """The checked merged step of ``stacks``; raises InputError where they cannot be merged."""
        step = WovenStep(stacks)
        step.check()
        return step

    def observe(self, step: WovenStep, observer: Observer, streams: bool) -> None:
        """Let ``observer`` see the operators of ``step`` from its next call on."""
        register()
        dry_run_woven(step, observer, streams)
