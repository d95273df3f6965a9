"""Watch the calls of a trial: what a user's module reads of earlier calls, writes, and leaves behind."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from weft.core.errors import SpecError
from weft.runtime.batches.source import Batch
from weft.runtime.step.forward import Forward
from weft.runtime.step.inputs import given_tensors
from weft.runtime.step.members.kept_elsewhere import BeforeCalls, closure_state, differing, frozen_state
from weft.runtime.user_modules.attributes import Kept, keeping_others
from weft.runtime.user_modules.input_writes import InputWrites
from weft.runtime.user_modules.kept.reads import KeptReads
from weft.runtime.user_modules.kept.walking import Places, kept_tensors
from weft.runtime.user_modules.weight_writes import WeightWrites


class Watch:
    """Watches calls of ``forward``; ``held``: names of the parameters and buffers that the training state holds.

    ``outside``: what was outside of the module before any call.
    """

    def __init__(self, forward: Forward, batch: Batch, held: Collection[str], outside: BeforeCalls) -> None:
        self._forward, self.model = forward, forward.model
        self._places = Places(self.model, held)
        self._given = given_tensors(self.model, batch)
        self.writes, self._inputs = WeightWrites(self.model), InputWrites(self._given)
        self._names = frozenset((*dict(self.model.named_modules()), *dict(self.model.named_parameters())))
        self.outside, self._closures = outside, closure_state(self.model)
        self._frozen = frozen_state(self.model)
        self._first = self._last = self.kept()
        self._rewritten: dict[str, None] = {}
        self.read: dict[str, None] = {}
        self.branches = False
        self.changed_buffers: set[str] = set()
        self.changed_in_evaluation: set[str] = set()

    def kept(self) -> Kept:
        """The tensors that the module keeps now."""
        return kept_tensors(self._places, self.model)

    @contextmanager
    def call(self, training: bool) -> Iterator[None]:
        """Around one call, with its backward pass."""
        before = self.kept()
        reads = KeptReads(before, self._ours())
        self.writes.reads_gradient = False  # a hook in the backward pass may
        self._forward.around = _All(self.writes, self._inputs, reads)
        try:
            yield
        finally:
            self._forward.around = nullcontext()
        self._check_inputs()
        if not training:
            self._check_gradients()
        self._learn(reads, before, training)

    def _learn(self, reads: KeptReads, before: Kept, training: bool) -> None:
        now, first = self.kept(), self._last is self._first
        changed = [*keeping_others(before, now), *sorted(reads.written)]
        if first and training:  # what was not there before may be a cache
            there = {name for name, _, _ in before}
            changed = [name for name in changed if name in there]
        self._rewritten |= dict.fromkeys(changed)
        self.read |= dict.fromkeys(sorted(reads.names))
        self.branches = self.branches or reads.branches
        self._last = now

    def keeps_others_than(self, before: Kept) -> bool:
        """Whether the module keeps other tensors now, or other values in the same ones."""
        return bool(keeping_others(before, self.kept()))

    def _ours(self) -> list[Tensor]:
        held = [p for p in self.model.parameters() if p.requires_grad]
        named = {place.name for place in self._places}
        held += [one for name, one in self.model.named_buffers() if name not in named]
        return [*held, *self._given.values()]

    # ---- what was seen -----------------------------------------------------------------------------------

    @property
    def rewritten(self) -> list[str]:
        """Places with tensors that calls make anew or write to, again and again."""
        constrained = {id(one.weight) for one in self.model.modules() if getattr(one, "max_norm", None) is not None}
        stay = {name for name, one, _ in self._last if id(one) in constrained}
        return [name for name in self._rewritten if name not in stay]

    @property
    def made(self) -> list[str]:
        """Places with tensors that the first calls made, and that none has changed since."""
        return [name for name in keeping_others(self._first, self._last) if name not in self._rewritten]

    def registered(self) -> list[str]:
        """Submodules and parameters that calls have made."""
        return [
            name
            for name in (*dict(self.model.named_modules()), *dict(self.model.named_parameters()))
            if name not in self._names
        ]

    def frozen_changed(self) -> list[str]:
        """Parameters that do not train, and that calls have changed."""
        return differing(self._frozen, frozen_state(self.model))

    def functions_changed(self) -> list[str]:
        """Functions that the module keeps, and whose variables calls have changed."""
        return differing(self._closures, closure_state(self.model))

    def check_shared(self, changed: Sequence[str]) -> None:
        """A :class:`SpecError` if calls have ``changed`` what all copies of the module share."""
        if changed:
            raise SpecError(
                f"model {_name(self.model)} changes {changed[0]} when it is called, and gives other numbers when it is "
                "called again; that is shared by all copies of it, so their calls would change it too: keep it in self"
            )

    def _check_inputs(self) -> None:
        changed = self._inputs.changed()
        if changed:
            name = changed[0]
            raise SpecError(
                f"model {_name(self.model)} changes {name} in place, which every call is given again; let it change a "
                f"copy: {name} = {name}.clone()"
            )

    def _check_gradients(self) -> None:
        if self.writes.reads_gradient:
            raise SpecError(
                f"model {_name(self.model)} reads the .grad of its weights in evaluation, where Weft has none: keep "
                "what it needs of them in a buffer, by a hook on the weight"
            )


def _name(model: nn.Module) -> str:
    return type(model).__name__


class _All(AbstractContextManager[None]):
    """Several that watch, each inside of the one before; may be entered again."""

    def __init__(self, *watches: AbstractContextManager[Any]) -> None:
        self._watches = watches
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        self._entered.append(ExitStack())
        for watch in self._watches:
            self._entered[-1].enter_context(watch)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)
