"""One epoch of all stacks of a group: in turn, concurrent, merged into one step, or compiled, as the plan says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from weft.core.errors import InputError
from weft.core.plan import Plan
from weft.runtime.device.side_streams import ConcurrentSteps, Steps, in_turn
from weft.runtime.device.torch_rng import OwnGenerator
from weft.runtime.step.stack import Stack


class MergedStep(Protocol):
    """One epoch of several stacks as one merged step."""

    stacks: tuple[Stack, ...]

    def __call__(self) -> None:
        """Train one epoch, evaluate and record the outcome."""

    def without_evaluation(self) -> None:
        """Train one epoch and record only its training losses."""


class StepMerger(Protocol):
    """Merges the steps of stacks; the engine supplies one for plans that need it (``weft.weave``)."""

    def merge(self, stacks: Sequence[Stack]) -> Any:
        """The merged step; raises InputError if the stacks cannot be merged."""

    def observe(self, step: Any, observer: Any, streams: bool) -> None:
        """Report the merged step to a dry run."""


class GroupStep:
    """The step of ``stacks``, a list that the group may shorten; remarks for the user go to ``notes``.

    ``own_random`` has the generators of stacks (by id) with a generator of their own.
    """

    def __init__(
        self,
        stacks: list[Stack],
        plan: Plan,
        device: torch.device,
        merger: StepMerger | None,
        own_random: dict[int, OwnGenerator],
        notes: list[str],
    ) -> None:
        self._stacks, self._plan, self._device, self._merger = stacks, plan, device, merger
        self._own_random, self._notes = own_random, notes
        self.merged: MergedStep | None = None  # the merged step of several stacks, once it is prepared
        at_once = plan.join == "concurrent" and device.type == "cuda"
        self.run_steps: Callable[[Steps], None] = ConcurrentSteps(device) if at_once else in_turn
        self._built: set[bool] = set()  # kinds of steps, with and without evaluation, that have run before
        self._refused: set[int] = set()  # stacks that failed to compile: not tried again

    def evaluated(self) -> None:
        """One epoch of every stack with its evaluation, as it is captured."""
        if self.merged is not None:
            self.merged()
        self._each([partial(self.in_own_random, stack, stack) for stack in self._apart()], evaluated=True)

    def without_evaluation(self) -> None:
        """One epoch of every stack that records only the training losses."""
        if self.merged is not None:
            self.merged.without_evaluation()
        steps = [partial(self.in_own_random, stack, stack.without_evaluation) for stack in self._apart()]
        self._each(steps, evaluated=False)

    def _each(self, steps: Steps, evaluated: bool) -> None:
        """Steps of stacks, concurrent if the plan says so; the first time in turn, since they build shared data."""
        go = self.run_steps if evaluated in self._built and len(steps) > 1 else in_turn
        go(steps)
        self._built.add(evaluated)

    def _apart(self) -> list[Stack]:
        """The stacks whose steps are not merged with others."""
        return [stack for stack in self._stacks if self.merged is None or stack not in self.merged.stacks]

    def in_own_random(self, stack: Stack, step: Callable[[], None]) -> None:
        own = self._own_random.get(id(stack))
        if own is None:
            step()
        else:
            with own:
                step()

    def rebuild(self) -> None:
        """Run the next step in turn: a stack has changed, and builds shared data again."""
        self._built.clear()

    # ---- merging and compiling -----------------------------------------------------------------------

    def merge(self) -> None:
        """Merge the steps of several stacks into one if the plan says so; if that fails, a note says why.

        The merged step is checked against the stacks' own; if it fails, training goes on without it, with a note.
        """
        stacks = [stack for stack in self._stacks if id(stack) not in self._own_random and stack.eager is None]
        if self._plan.join != "woven" or len(stacks) < 2 or self.merged is not None:
            return
        try:
            if self._merger is None:
                raise InputError("this run has no step merger")
            self.merged = self._merger.merge(stacks)
        except torch.OutOfMemoryError:
            raise
        except Exception as reason:
            what = str(reason) if isinstance(reason, InputError) else f"{type(reason).__name__}: {reason}"
            self._notes.append(f"{len(stacks)} stacks train side by side, not as one step: {what.splitlines()[0]}")

    def observe_merged(self, observer: Any) -> None:
        """Report the merged step, if there is one, to a dry run."""
        if self.merged is not None and self._merger is not None:
            self._merger.observe(self.merged, observer, streams=self._plan.device == "cuda")

    def compile(self, skips_evaluations: bool) -> None:
        """Compile the steps of stacks with Inductor if the plan says so; if that fails, a note says why."""
        if not self._plan.compiled or self.merged is not None:
            return
        from weft.runtime.compile.inductor import compile_stack  # brings in torch's compilers

        for stack in self._stacks:
            if id(stack) in self._refused:
                continue
            try:
                self.in_own_random(stack, partial(compile_stack, stack, skips_evaluations))
            except (InputError, torch.OutOfMemoryError) as reason:
                what = "memory ran out" if isinstance(reason, torch.OutOfMemoryError) else str(reason)
                self._note_once(f"the step is not compiled: {what}")
                self._refused.add(id(stack))

    def as_written(self, note: str) -> None:
        """Continue without the compiled functions."""
        for stack in self._stacks:
            stack.as_written()
        self._note_once(note)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _note_once(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)
