"""TryOut: call the members' models before training, alone and together, and learn from it how they may be trained.

Errors of a model show here, before the first epoch. A user's module is also called as a plain loop of torch would call
it (:mod:`weft.runtime.step.trial`): several train in one step only if each gets its own numbers.

Shapes: P parameters, N nodes, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.batches.source import Batch
from weft.core.errors import SpecError
from weft.runtime.device.process import DTYPES, same_draws
from weft.runtime.modules.copying import copy_module
from weft.runtime.modules.settings import model_errors
from weft.runtime.modules.writes import WeightWrites, followers, shared_buffers
from weft.runtime.step.conversion import try_layers
from weft.runtime.step.copies import try_copy
from weft.runtime.step.forward import Forward, LeafForward, Loss, backward
from weft.runtime.step.inputs import bind, check_logits
from weft.runtime.step.losses import as_one, logits_and_extra, of_member
from weft.runtime.step.members import CannotStack, Members, set_reduce
from weft.runtime.step.outside import BeforeCalls, Outside
from weft.runtime.step.state import State
from weft.runtime.step.trial import NEAR, OTHERS, AloneStep, Calls, Trial, compare, try_again, try_alone

# ---- Check that a user's module can train with weights that are not its own parameters: cast ones, or those of ranks.


def check_used_through_modules(forward: Forward, state: State, batch: Batch, loss: Loss) -> None:
    """A :class:`SpecError` if the model reads a parameter other than through the module that it belongs to.

    Where weights are cast (bf16) or gradients are sent to other ranks, the module is given other tensors than its own
    parameters.
    """
    for one in followers(forward.model, dict(forward.model.named_parameters())):
        raise SpecError(
            f"model {type(forward.model).__name__} keeps {one.name}, which is in the memory of {one.owner}; only "
            "precision='fp32' and 'tf32' on one rank can train that"
        )
    own = [p for p in forward.model.parameters() if p.requires_grad and p.is_leaf]
    leaf = state.flat.detach().requires_grad_()
    forward.around = writes = WeightWrites(forward.model)
    try:
        losses = loss(forward(leaf, training=True, batch=batch), batch)
        with writes:
            backward(losses, torch.ones_like(losses), [leaf, *own])
    except RuntimeError:  # autograd may object first, in words about views
        if not writes.seen:
            raise
    finally:
        forward.around = nullcontext()
    if writes.seen:
        raise SpecError(
            f"model {type(forward.model).__name__} changes its own weights when it is called; only precision='fp32' "
            "and 'tf32' on one rank can train that"
        )
    found = [parameter.grad is not None for parameter in own]
    for parameter in own:
        parameter.grad = None
    if any(found):
        raise SpecError(
            f"model {type(forward.model).__name__} reads a parameter other than as an attribute of its module (from a "
            "list or a closure); only precision='fp32' and 'tf32' on one rank can train that"
        )


LossOf = Callable[[Sequence[int]], Loss]  # the loss of some members, by their rows


class TryOut:
    """Tries ``members`` with the weights of ``state``, which stays as it is; what it finds is kept in ``members``."""

    def __init__(self, members: Members, state: State, loss_of: LossOf) -> None:
        self._members, self._state, self._loss_of = members, state, loss_of
        self._task, self._device = members.task, members.builder.inputs.device
        self._models = members.models_to_try()
        self._outside = BeforeCalls(self._models[0] if self._models else members.model)

    def __call__(self) -> None:
        """Raises what a model raises, as one sentence, or :class:`CannotStack` with the reason."""
        try:
            self._try()
        except Exception:
            self._outside.put_back()  # another member is to find it as this one did
            raise

    def _try(self) -> None:
        runs = self._members.is_users and not self._state.flat.is_meta
        with same_draws(self._device) if runs else nullcontext():
            self._try_features()
            if runs:
                try_layers(self._members, self._state, self._models, self._loss_of([0]))
                self._try_alone()
            elif self._members.is_users and self._state.members > 1:
                self._together()
        if runs:
            try_copy(self._members, self._state)

    # ---- one call ------------------------------------------------------------------------------------

    def _try_features(self) -> None:
        try:
            self._check_output()
        except SpecError as error:
            self._members.builder.note_dense(error)
            self._members.source = self._members.source_of(dense=True)
            self._check_output()

    def _check_output(self) -> None:
        """Call the first member's model and check what it returns."""
        task, batch = self._members.slots[0].task, self._members.source.example()
        with torch.no_grad(), model_errors(task, self._members.builder.graph.name):
            output = self._first_output(batch)
        if task.has_own("objective"):
            self._members.plain_output = isinstance(output, Tensor)
            return
        own = not isinstance(output, Tensor) and task.traits is None
        logits = logits_and_extra(output, task.label)[0] if own else output
        graph = self._members.builder.graph
        per = "number to predict" if graph.regression else "class"
        check_logits(task.label, self._members.model, logits, batch.y.shape[0], graph.num_classes, per)

    def _first_output(self, batch: Batch) -> Any:
        """What the first member's model returns in evaluation mode; a user's is called as a copy of its own."""
        members, state = self._members, self._state
        rates = [rate[None] for rate in members.slots[0].rates]
        if members.is_users and not state.flat.is_meta:
            model, reduce = members.builder.to_call(self._models[0]), members.source.reduce
            set_reduce(model, reduce)
            forward = Forward(model, members.layout, bind(model), DTYPES[members.slots[0].task.precision], reduce)
            forward.attach(state.select([0]), rates)
            with members.builder.naming_left_out(self._models[0]):
                return forward.one(state.flat[0], training=False, batch=batch)
        members.forward.attach(state.select([0]), rates)
        try:
            return members.forward.one(state.flat[0], training=False, batch=batch)
        finally:
            members.attach(state)

    # ---- alone and together --------------------------------------------------------------------------

    def _try_alone(self) -> None:
        """Try every member alone, and all together if there are several, and compare the gradients.

        All together comes second: what it returns is kept while the members follow, which takes less memory than to
        keep what they return while all run at once.
        """
        first, members = self._trial(0), self._state.members
        self._learn(first)
        if members == 1:
            return
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what one member leaves lies where the blocks of all would
        outside = Outside(self._models[0])
        with same_draws(self._device):
            together = self._together()
        outside.put_back()  # tensors of all members at once are of no use later
        if self._members.builder.inputs.agree:  # which noise might let a second comparison deny
            return
        seconds, same = [], self._is_same(0, first, *together)
        del first
        for row in range(1, members):
            trial = self._trial(row)
            same = self._is_same(row, trial, *together) and same
            seconds.append(trial.seconds or 0.0)
        if self._members.source.reduce.sum(together[0].new_tensor(float(not same))):  # all ranks decide alike
            raise CannotStack(f"{self._task.model_name} gives other results for several at once than for one")
        del together
        self._members.alone = self._alone_step(1)
        self._members.alone_seconds = min(seconds)  # not of the first, whose calls are watched

    def _alone_with(self, model: nn.Module, row: int) -> tuple[Forward, State]:
        """A user's ``model`` alone, with a state of its own: that of member ``row``."""
        set_reduce(model, self._members.source.reduce)
        forward, own = self._members.forward_of(model, alone=True), self._state.select([row])
        forward.attach(own, [rate[None] for rate in self._members.slots[row].rates])
        return forward, own

    def _alone_step(self, row: int) -> AloneStep:
        forward, own = self._alone_with(self._models[row], row)
        return AloneStep(forward, own, self._members.source.example(), self._loss_of([row]))

    def _trial(self, row: int) -> Trial:
        model = self._models[row]
        set_reduce(model, self._members.source.reduce)  # before it is copied: it is not the model's doing
        untouched = copy_module(model)[0] if row == 0 else None
        shared = shared_buffers(model) if row == 0 else []  # before training gives them places of their own
        calls = self._calls(model, row)
        if not isinstance(calls.forward, LeafForward):
            check_used_through_modules(*self._alone_with(model, row), calls.batch, self._loss_of([row]))
        if untouched is None:
            return try_again(calls)
        elsewhere = lambda: self._calls(copy_module(untouched)[0], row)  # noqa: E731
        trial = try_alone(calls, untouched, elsewhere, self._outside, isinstance(self._task.model, nn.Module))
        self._check_buffers(shared, trial.changed_buffers)
        return trial

    def _check_buffers(self, shared: Sequence[tuple[str, str]], changed: Collection[str]) -> None:
        for owner, name in shared:
            if owner in changed or name in changed:
                raise SpecError(
                    f"task {self._task.label!r}: buffer {name} of model {self._task.model_name} is in the memory of "
                    f"buffer {owner}, so that a change of one would change the other; let one be made of the other in "
                    "forward, or be a .clone() of it"
                )

    def _calls(self, model: nn.Module, row: int) -> Calls:
        forward, own = self._alone_with(model, row)
        return Calls(forward, own, self._members.source.example(), self._loss_of([row]))

    def _learn(self, trial: Trial) -> None:
        """What the first trial tells of the module; :class:`CannotStack` if several cannot be trained in one step."""
        name, several = self._task.model_name, self._state.members > 1
        if several and self._members.builder.inputs.agree and trial.hidden_state == OTHERS:
            trial = replace(trial, hidden_state=None)
        if trial.hidden_state is not None and several:
            raise CannotStack(f"{name} cannot be one of several: {trial.hidden_state}")
        if trial.writes and several:
            raise CannotStack(f"{name} cannot be one of several: it changes its own weights when called")
        self._members.learn(trial)
        self._note_lost(trial)

    def _note_lost(self, trial: Trial) -> None:
        """Say what does not come back, in a resumed training or with the best weights."""
        name, note = self._task.model_name, self._members.builder.note_once
        if trial.hidden_state is not None and trial.lost:
            loaded = ", and a result that is loaded does not predict" if trial.needs_lost else ""
            note(
                f"{name} keeps {trial.lost[0]!r} between calls, which no file can hold: its training cannot be "
                f"resumed, and its best weights are given back with what it keeps at the end of training{loaded}"
            )
        elif trial.hidden_state == OTHERS:
            note(
                f"{name} gives other numbers when it is called again, and keeps what it needs for that where Weft does "
                "not see it: that is neither resumed nor given back with the best weights"
            )

    def _together(self) -> tuple[Tensor, Tensor, Any]:
        """Losses, gradients and logits of all members; :class:`CannotStack` if a module fails for all at once."""
        state, batch = self._state, self._members.source.example()
        before, loss = state.snapshot(), self._loss_of(range(state.members))
        try:
            slopes = torch.ones(state.members, device=state.flat.device)
            losses, grad = self._members.forward.gradients(state.flat, batch, loss, slopes)
            state.restore(before)
            with torch.no_grad():
                return losses, grad, self._members.forward(state.flat, training=False, batch=batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CannotStack(f"{self._task.model_name} does not run for several at once: {reason}") from error
        finally:
            state.restore(before)

    def _is_same(self, row: int, trial: Trial, losses: Tensor, grad: Tensor, logits: Any) -> bool:
        """Whether a member has the loss, gradients and logits that it has alone."""
        near, layout = NEAR[self._task.precision], self._members.layout
        return compare(trial, losses[row : row + 1], grad[row], as_one(of_member(logits, row)), layout, near)
