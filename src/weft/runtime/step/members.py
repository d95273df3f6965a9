"""Build the members of a stack: their models at true size, and the one model that runs for all of them.

Every member's model is built from its own seed at its own width, then laid out in the flat buffer of the widest.

Shapes: T members, P parameters of the widest model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.compatibility import padding_obstacle
from weft.core.errors import SpecError, WeftError
from weft.core.settings.value_names import identity
from weft.core.task import Task
from weft.graph.data.graph import Graph
from weft.graph.data.sparse_features import SparseFeatures
from weft.nn.dropout import Dropout
from weft.nn.norm import BatchNorm, LayerNorm
from weft.nn.pyg.swap import restore
from weft.ops.reduce import ONE_RANK, Reduce
from weft.runtime.batches.source import Batch, Features, Source
from weft.runtime.device.precision import DTYPES
from weft.runtime.device.torch_rng import same_draws
from weft.runtime.loop.outputs import as_one, logits_and_extra, of_member
from weft.runtime.step.buffers import RATE, BufferSlots, detach_clock, drawing_modules, take_buffers
from weft.runtime.step.forward import Forward, LeafForward, Loss
from weft.runtime.step.inputs import Inputs, bind, check_logits, layers_of, takes_blocks, takes_edges
from weft.runtime.step.parameters import Layout, first_layer_prefix, layout_of
from weft.runtime.step.state import State
from weft.runtime.step.trial import (
    EQUAL,
    NEAR,
    Trial,
    apart,
    check_used_through_modules,
    compare,
    try_again,
    try_alone,
)
from weft.runtime.step.zero_padding import Padding, widths_of
from weft.runtime.user_modules.attributes import unequal
from weft.runtime.user_modules.build import build_model
from weft.runtime.user_modules.call_style import check_call
from weft.runtime.user_modules.compiled import as_written, was_compiled
from weft.runtime.user_modules.converting import Conversion, Trials, convert, convertible, try_conversion, try_sparse
from weft.runtime.user_modules.copying import copy_module
from weft.runtime.user_modules.edge_use import check_edges, given_of_edges, unread_edges
from weft.runtime.user_modules.error_place import in_one_line, place_of
from weft.runtime.user_modules.python_state import restore_state, saved_state


class CannotStack(Exception):
    """Raised for tasks that cannot be one stack, with the reason; each of them may still train by itself."""


@dataclass(frozen=True)
class MemberSlot:
    """One member of a stack: its task, how its width is padded (None: not at all), and its dropout rates."""

    task: Task
    padding: Padding | None
    rates: tuple[Tensor, ...]


class Members:
    """The members of a stack and the model that runs for all of them; see :class:`weft.runtime.step.stack.Stack`."""

    def __init__(self, tasks: Sequence[Task], inputs: Inputs, first_once: bool) -> None:
        self._inputs, self._first_once = inputs, first_once
        self._graph = inputs.graph
        self.notes: list[str] = []
        self._made_dense = False  # features, because the model does not take sparse ones
        widest = max(range(len(tasks)), key=lambda row: tasks[row].hidden)
        self._task = tasks[widest]
        models = [self._build_whole(task) for task in tasks]
        self._model = models[widest]
        self._is_users = self._task.traits is None
        self.hidden_state: str | None = None  # why a captured step would not be what the module does
        self.plain_output = True  # the model returns one tensor
        self.without_gradient: tuple[str, ...] = ()
        self.writes = False  # whether a user's module changes its own weights in a step
        self.alone_seconds: float | None = None  # of a step and evaluation of one alone, in stacks on a CPU
        self._changing: tuple[str, ...] = ()
        self._rebuilds = False  # a copy would not follow its own weights: build the module anew instead
        check_edges(self._task, self._graph)
        if self._is_users:
            self._check_users(models)  # before one of them is set up to run for all
        converted = self._converts and inputs.device.type == "meta" and self._convert_unseen()
        rates = self._take_rates(models)
        self._trials = self._copies_to_try(models, widest)
        _set_stacked(self._model, len(tasks) > 1)
        as_pyg = self._sparse and takes_edges(self._model) and not converted
        self.source = self._source(dense=self._made_dense or as_pyg)
        _set_reduce(self._model, self.source.reduce)
        self._check_norms()
        self.layout = self._checked_layout(tasks, models)
        wide = take_buffers(self._model)
        paddings = [self._padding(task, model, wide) for task, model in zip(tasks, models, strict=True)]
        self._initial = self._stacked(models, paddings, wide)
        self.forward = self._forward(self._model, alone=len(tasks) == 1)
        self.slots = [MemberSlot(*parts) for parts in zip(tasks, paddings, rates, strict=True)]
        self.notes += _empty_relations(self._task, self._graph) + unread_edges(self._task, self._model, self._graph)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Row by row."""
        return tuple(slot.task for slot in self.slots)

    @property
    def model(self) -> nn.Module:
        """The model that runs for all of them."""
        return self._model

    @property
    def layers(self) -> int | None:
        """Layers of the model, if each can be run alone."""
        return layers_of(self._model)

    @property
    def in_first_layer(self) -> list[bool]:
        """Per parameter of the layout, whether it is the first layer's, or of the norm after it (``epilogues.0``)."""
        prefix = first_layer_prefix(self._model)
        return [name.startswith(prefix) or name.split(".")[1:2] == ["0"] for name in self.layout.names]

    @property
    def _converts(self) -> bool:
        """Whether the layers of PyG in a user's module may compute with Weft's operators."""
        return self._is_users and self._task.convert is not False

    def _convert_unseen(self) -> bool:
        """Convert in a dry run, which has nothing to compare, what a run converts if it is equal."""
        found = convertible(self._model, asked=self._task.convert is True)
        if found.layers:
            self.notes.append(f"{found.counted()} of PyG to be converted, if that changes no number")
            convert(self._model, found)
        return bool(found.layers)

    @property
    def _sparse(self) -> bool:
        return isinstance(self._graph.x, SparseFeatures)

    def initial(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Weights ``[T, P]`` and buffers ``[T, ...]`` before the first epoch; may be taken once."""
        flat, buffers = self._initial
        del self._initial
        return flat, buffers

    def _forward(self, model: nn.Module, alone: bool) -> Forward:
        """``model`` as a function of weights; a user's module alone trains with its own parameters."""
        dtype, reduce = DTYPES[self._task.precision], self.source.reduce
        plain = dtype == torch.float32 and reduce.ranks == 1
        if self._is_users and alone and plain:
            return LeafForward(model, self.layout, bind(model), reduce)
        return Forward(model, self.layout, bind(model), dtype, reduce)

    def attach(self, state: State) -> None:
        """Bind the clocks and buffers of ``state``, and all members' dropout rates, to the model."""
        self.forward.attach(state, [torch.stack(column) for column in zip(*(s.rates for s in self.slots), strict=True)])

    def python_state(self) -> dict[str, Tensor]:
        """What the module keeps in Python between calls, for a checkpoint; empty if it keeps nothing."""
        return {} if self.hidden_state is None else saved_state(self._model, self._changing)

    def restore_python_state(self, saved: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`python_state`."""
        if self.hidden_state is not None:
            restore_state(self._model, saved)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only the members in ``rows``."""
        self.slots = [self.slots[row] for row in rows]

    def _check_norms(self) -> None:
        """A batch that ranks share has some nodes on several of them: a norm over rows would count those twice."""
        shared = self.source.reduce.ranks > 1 and not self.source.constant
        if shared and any(isinstance(module, BatchNorm) for module in self._model.modules()):
            raise SpecError(
                f"task {self._task.label!r}: a batch norm does not go with sampled training over ranks, which share "
                "the nodes of a batch; use norm='layer', or one rank"
            )

    # ---- building ------------------------------------------------------------------------------------

    def _build(self, task: Task) -> nn.Module:
        device = self._inputs.device
        # A dry run needs no values, and drawing those of many members takes longer than the rest.
        with device if device.type == "meta" and task.traits is not None else nullcontext():
            graph = self._graph
            _check_relations(task, graph)
            model = build_model(task, graph.num_features, graph.num_classes, graph.num_relations)
            if was_compiled(task, model):
                model = as_written(model)
                self._note_once(f"{task.model_name} trains as written, without torch.compile; compile= compiles steps")
            return model.to(device)

    def _note_once(self, note: str) -> None:
        self.notes += [note] if note not in self.notes else []

    def _build_whole(self, task: Task) -> nn.Module:
        """A model whose lazy layers, if it has any, are initialised."""
        model = self._build(task)
        if any(nn.parameter.is_lazy(p) for p in model.parameters()):
            try:
                self._call_lazy(model, task, dense=self._made_dense or (self._sparse and takes_edges(model)))
            except SpecError as error:
                self._note_dense(error)
                self._call_lazy(model, task, dense=True)
        return model

    def _check_users(self, models: list[nn.Module]) -> None:
        """Refuse what cannot be trained as written; :class:`CannotStack` for what cannot be stacked."""
        task, adj = self._task, self._graph.adj
        had = {"edge_weight": adj.weight, "edge_type": adj.relation, "edge_attr": adj.edge_attr}
        check_call(task, models[0], tuple(name for name, value in had.items() if value is not None))
        for name, parameter in models[0].named_parameters():
            if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.complex64):
                kind = str(parameter.dtype).removeprefix("torch.")
                raise SpecError(
                    f"task {task.label!r}: parameter {name} of model {task.model_name} is {kind}; Weft keeps weights "
                    "in float32: call .float() on the model, and choose the arithmetic by precision="
                )
        if len(models) > 1:
            _check_attributes(models)
            _check_hooks(models)

    def _copies_to_try(self, models: list[nn.Module], widest: int) -> list[nn.Module]:
        """A module to try for every member: its own, and a copy of the one that runs for all."""
        if not self._is_users or self._inputs.device.type == "meta":
            return []
        return [self._another(model) if row == widest else model for row, model in enumerate(models)]

    def _another(self, model: nn.Module) -> nn.Module:
        """The module of the widest task again: built anew, or a copy of the object that the task was given."""
        if isinstance(self._task.model, nn.Module):
            return self._copied(model)
        with same_draws(self._inputs.device):
            return self._build_whole(self._task)

    def _copied(self, model: nn.Module) -> nn.Module:
        try:
            return copy_module(model)[0]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise self._cannot_copy(f"{type(error).__name__}: {error}") from error

    def _call_lazy(self, model: nn.Module, task: Task, dense: bool) -> None:
        with torch.no_grad(), _model_errors(task, self._graph.name):
            bind(model.eval())(self._source_for(model, self._features(dense)).example())

    def _features(self, dense: bool) -> Features:
        return self._inputs.features(self._task.feature_norm, DTYPES[self._task.precision], dense)

    def _take_rates(self, models: list[nn.Module]) -> list[tuple[Tensor, ...]]:
        """Every member's dropout rates; the shared model drops wherever one of the members does."""
        found = [[module for module in drawing_modules(model) if RATE in module._buffers] for model in models]
        if len({len(modules) for modules in found}) > 1:
            raise CannotStack("their models have different random modules")
        rates = [tuple(module.rate.clone() for module in modules) for modules in found]
        for same_place in zip(*found, strict=True):
            most = max(getattr(module, "p", 0.0) for module in same_place)
            for module in same_place:
                if hasattr(module, "p") and module.p == 0.0:
                    module.p = most
        return rates

    def _checked_layout(self, tasks: Sequence[Task], models: list[nn.Module]) -> Layout:
        decaying = next((task for task in tasks if task.weight_decay), tasks[0])
        layout = layout_of(self._model, decaying.decay)
        if not layout.names:
            task = self._task
            raise SpecError(f"task {task.label!r}: model {task.model_name} has no trainable parameters")
        if any(layout_of(model, "all").names != layout.names for model in models):
            raise CannotStack("their models have different parameters")
        if len(models) > 1:
            _check_frozen(models)
        return layout

    def _padding(self, task: Task, model: nn.Module, wide_buffers: dict[str, Tensor]) -> Padding | None:
        narrow = {name: p.shape for name, p in model.named_parameters()}
        wide = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        if all(narrow[name] == shape for name, shape in wide.items()):
            return None
        reason = padding_obstacle(task)
        if reason is not None:
            raise CannotStack(f"their widths differ, and {reason}")
        buffers = {name: (b.shape, wide_buffers[name].shape) for name, b in take_buffers(model).items()}
        return Padding(widths_of(task, self._task.hidden), narrow, wide, buffers, self._inputs.device)

    def _stacked(
        self, models: list[nn.Module], paddings: list[Padding | None], wide: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        flats, taken = [], []
        for model, padding in zip(models, paddings, strict=True):
            flat, buffers = self.layout.flatten(dict(model.named_parameters())), take_buffers(model)
            if padding is not None:
                flat = padding.widen(flat)
                buffers = {name: padding.widen_buffer(name, value) for name, value in buffers.items()}
            flats.append(flat)
            taken.append(buffers)
        if any(buffers.keys() != wide.keys() for buffers in taken):
            raise CannotStack("their models have different buffers")
        return torch.stack(flats), {name: torch.stack([buffers[name] for buffers in taken]) for name in wide}

    # ---- calling -------------------------------------------------------------------------------------

    def _note_dense(self, error: SpecError) -> None:
        """Add a note that features are made dense, if that may help a user's model that failed with ``error``."""
        if not self._sparse or self._task.traits is not None or error.__cause__ is None or self._made_dense:
            raise error
        self._made_dense = True
        self.notes.append(f"features made dense: the model does not take sparse ones ({error.__cause__})")

    def _source(self, dense: bool) -> Source:
        """The source of batches of the shared model."""
        task, x, first = self._task, self._features(dense), None
        if self._first_once:
            first = self._inputs.first(self._model, x, aggregation_key(task))
        over_rows = any(isinstance(module, BatchNorm) for module in self._model.modules())
        padding = task.traits is not None and not over_rows
        return self._source_for(self._model, x, first, padding)

    def _source_for(self, model: nn.Module, x: Features, first: Tensor | None = None, padding: bool = False) -> Source:
        of_edges = given_of_edges(self._task, model, self._graph.adj)
        return self._inputs.source(x, first, not takes_blocks(model), padding, of_edges)

    def try_out(self, state: State, loss_of: Callable[[Sequence[int]], Loss]) -> None:
        """Call the model before training, so that errors show; a user's one also as a plain loop would call it."""
        users = self._is_users and not state.flat.is_meta
        with same_draws(self._inputs.device) if users else nullcontext():
            self._try_features(state)
            if users:
                self._try_conversion(state, loss_of([0]))
                self._try_alone(state, loss_of)
            elif self._is_users and state.members > 1:
                self._together(state, loss_of(range(state.members)))
        if users:
            self._try_copy(state)
        self._trials = []

    def _try_features(self, state: State) -> None:
        try:
            self._alone(state, 0)
        except SpecError as error:
            self._note_dense(error)
            self.source = self._source(dense=True)
            self._alone(state, 0)

    def _alone(self, state: State, row: int) -> Tensor:
        """Logits ``[N, C]`` of one member without the others, in evaluation mode; a user's on a copy of its own."""
        task, batch, rates = self.slots[row].task, self.source.example(), [rate[None] for rate in self.slots[row].rates]
        with torch.no_grad(), _model_errors(task, self._graph.name):
            if self._is_users and not state.flat.is_meta:
                model = self._copied(self._trials[row])
                _set_reduce(model, self.source.reduce)
                forward = Forward(model, self.layout, bind(model), DTYPES[task.precision], self.source.reduce)
                forward.attach(state.select([row]), rates)
                logits = forward.one(state.flat[row], training=False, batch=batch)
            else:
                self.forward.attach(state.select([row]), rates)
                try:
                    logits = self.forward.one(state.flat[row], training=False, batch=batch)
                finally:
                    self.attach(state)
        if task.has_own("objective"):
            self.plain_output = isinstance(logits, Tensor)
        else:
            own = not isinstance(logits, Tensor) and task.traits is None
            logits = logits_and_extra(logits, task.label)[0] if own else logits
            per = "number to predict" if self._graph.regression else "class"
            check_logits(task.label, self._model, logits, batch.y.shape[0], self._graph.num_classes, per)
        return as_one(logits)

    def _try_alone(self, state: State, loss_of: Callable[[Sequence[int]], Loss]) -> None:
        """Try every member alone, and all together if there are several, and compare the gradients."""
        trials = []
        for row in range(state.members):
            trials.append(self._trial(state, row, loss_of([row])))
            if row == 0:
                self._learn(trials[0], state.members)
        if state.members > 1:
            self._compare(trials, *self._together(state, loss_of(range(state.members))))
            if state.flat.device.type == "cpu":
                trials += [self._trial(state, 1, loss_of([1])) for _ in range(2)]  # now with memory at hand
                self.alone_seconds = min(trial.seconds for trial in trials)  # single ones are slower on a busy machine

    def _try_conversion(self, state: State, loss: Loss) -> None:
        """Convert the layers of PyG in all modules if that changes no number of the first member's step."""
        if not self._converts or self.source.reduce.ranks > 1:
            return
        trials = self._trials_on(self.source, state, loss)
        found = try_conversion(self._trials[0], trials, asked=self._task.convert is True)
        if isinstance(found, Conversion):
            found = self._convert(found, trials, state, loss).note()
        self.notes += [] if found is None else [found]

    def _convert(self, found: Conversion, trials: Trials, state: State, loss: Loss) -> Conversion:
        if self._sparse and takes_edges(self._model) and self.source.constant:
            dense, source = self.source.example().x, self._source(dense=False)
            found = try_sparse(self._trials[0], found, trials, self._trials_on(source, state, loss))
            if found.sparse:
                self.source = source
                self._inputs.release(dense)
        for model in (self._model, *self._trials):
            convert(model, found.swaps)
        return found

    def _trials_on(self, source: Source, state: State, loss: Loss) -> Trials:
        step = partial(self._one_step, source.example(), state, loss)
        return Trials(self._copied, step, self._apart, EQUAL[self._task.precision])

    def _one_step(self, batch: Batch, state: State, loss: Loss, model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        """Losses ``[1]``, gradients ``[P]`` and logits ``[N, C]`` of a module with the weights of the first member."""
        forward, own = self._alone_with(model, state, 0)
        before = own.snapshot()
        with same_draws(self._inputs.device):
            losses, grad = forward.gradients(own.flat, batch, loss, torch.ones(1, device=own.flat.device))
        own.restore(before)
        with torch.no_grad(), same_draws(self._inputs.device):
            output = forward(own.flat, training=False, batch=batch)
        return losses, grad[0], as_one(of_member(output, 0))

    def _apart(self, mine: tuple[Tensor, Tensor, Tensor], true: tuple[Tensor, Tensor, Tensor]) -> float:
        pairs = zip(self.layout.views(mine[1]), self.layout.views(true[1]), strict=True)
        parts = [apart(one, other, true[1]) for one, other in pairs]
        return max(apart(mine[0], true[0]), apart(mine[2].float(), true[2].float()), *parts)

    def _alone_with(self, model: nn.Module, state: State, row: int) -> tuple[Forward, State]:
        """A user's ``model`` alone, with a state of its own: that of member ``row``."""
        _set_reduce(model, self.source.reduce)
        forward, own = self._forward(model, alone=True), state.select([row])
        forward.attach(own, [rate[None] for rate in self.slots[row].rates])
        return forward, own

    def _trial(self, state: State, row: int, loss: Loss) -> Trial:
        model = self._trials[row]
        _set_reduce(model, self.source.reduce)  # before it is copied: it is not the model's doing
        untouched = copy_module(model)[0] if row == 0 else None
        forward, own = self._alone_with(model, state, row)
        batch = self.source.example()
        if not isinstance(forward, LeafForward):
            check_used_through_modules(forward, own, batch, loss)
        if untouched is None:
            return try_again(forward, own, batch, loss)
        return try_alone(forward, own, batch, loss, untouched)

    def _learn(self, trial: Trial, members: int) -> None:
        """What the first trial tells of the module; :class:`CannotStack` if several cannot be trained in one step."""
        if trial.hidden_state is not None and members > 1:
            raise CannotStack(f"{self._task.model_name} cannot be one of several: {trial.hidden_state}")
        if trial.writes and members > 1:
            raise CannotStack(
                f"{self._task.model_name} cannot be one of several: it changes its own weights when called"
            )
        self.hidden_state, self._changing = trial.hidden_state, trial.attributes
        self.without_gradient, self.writes = trial.without_gradient, trial.writes
        if trial.without_gradient:
            self.layout = self.layout.without_decay(trial.without_gradient)

    def _together(self, state: State, loss: Loss) -> tuple[Tensor, Tensor, Any]:
        """Losses, gradients and logits of all members; :class:`CannotStack` if a module fails for all at once."""
        before, batch = state.snapshot(), self.source.example()
        try:
            slopes = torch.ones(state.members, device=state.flat.device)
            losses, grad = self.forward.gradients(state.flat, batch, loss, slopes)
            state.restore(before)
            with torch.no_grad():
                return losses, grad, self.forward(state.flat, training=False, batch=batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CannotStack(f"{self._task.model_name} does not run for several at once: {reason}") from error
        finally:
            state.restore(before)

    def _try_copy(self, state: State) -> None:
        """Copy a user's module as at the end of training, so that a failing copy is known before training.

        The copy is given other weights: one whose results do not follow them still holds the module's own somewhere.
        """
        task, row = self._task, self.slots[0]
        flat, buffers = state.flat[0] * 1.5 + 0.01, {name: buffer[0] for name, buffer in state.buffers.items()}
        try:
            model = self._copy_of(row, flat, buffers, state)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise self._cannot_copy(f"{type(error).__name__}: {error}") from error
        if self.hidden_state is not None or DTYPES[task.precision] != torch.float32 or state.members > 1:
            return
        batch = self.source.example()
        with torch.no_grad(), same_draws(self._inputs.device):
            before = state.snapshot()
            state.flat[0] = flat
            expected = self.forward.one(state.flat[0], training=False, batch=batch)
            state.restore(before)
            self._rebuilds = apart(as_one(bind(model)(batch)), as_one(expected)) > NEAR["tf32"]
        if self._rebuilds and isinstance(task.model, nn.Module):
            raise self._cannot_copy("a function that it keeps holds its parameters")

    def evaluated_by_copy(self, state: State, batch: Batch) -> Any:
        """What a copy of the first member's module returns in evaluation mode."""
        buffers = {name: buffer[0] for name, buffer in state.buffers.items()}
        with torch.no_grad():
            return bind(self._copy_of(self.slots[0], state.flat[0], buffers, state))(batch)

    def _cannot_copy(self, why: str) -> SpecError:
        task = self._task
        return SpecError(
            f"task {task.label!r}: model {task.model_name} cannot be copied, so its best weights could not be "
            f"given back: {why}"
        )

    def _note_left_out(self, names: Sequence[str]) -> None:
        if names:
            self._note_once(f"left out of the trained model, since they cannot be copied: {', '.join(names)}")

    def _compare(self, trials: Sequence[Trial], losses: Tensor, grad: Tensor, logits: Any) -> None:
        """:class:`CannotStack` unless every member has the loss, gradients and logits that it has alone."""
        near = NEAR[self._task.precision]
        same = all(
            compare(trial, losses[row : row + 1], grad[row], as_one(of_member(logits, row)), self.layout, near)
            for row, trial in enumerate(trials)
        )
        if self.source.reduce.sum(losses.new_tensor(float(not same))):  # all ranks decide alike
            raise CannotStack(f"{self._task.model_name} gives other results for several at once than for one")

    # ---- giving back ---------------------------------------------------------------------------------

    def tensors_of(
        self, slot: MemberSlot, flat: Tensor, buffers: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """``(flat [Q], buffers)`` at the true size of a member, from its padded ``flat [P]`` and buffers."""
        padding = slot.padding
        if padding is None:
            return flat, buffers
        return padding.narrow(flat), {name: padding.narrow_buffer(name, value) for name, value in buffers.items()}

    def named(self, slot: MemberSlot, flat: Tensor, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same by the names that the model's ``state_dict`` uses."""
        flat, buffers = self.tensors_of(slot, flat, buffers)
        layout = self.layout if slot.padding is None else slot.padding.layout(self.layout)
        return {**layout.named(flat), **buffers}

    def model_of(self, slot: MemberSlot, flat: Tensor, buffers: dict[str, Tensor], state: State) -> nn.Module:
        """A member's model of its own with these padded weights, in evaluation mode, outside of any stack.

        Converted layers are PyG's again: it is the module that the user wrote.
        """
        model = self._copy_of(slot, flat, buffers, state)
        restore(model)
        return model

    def _copy_of(self, slot: MemberSlot, flat: Tensor, buffers: dict[str, Tensor], state: State) -> nn.Module:
        device = self._inputs.device
        named = {name: value.to(device) for name, value in self.named(slot, flat, buffers).items()}
        if slot.task.traits is not None:
            model = self._build(slot.task)
        elif self._rebuilds:
            with same_draws(device):
                model = self._build_whole(slot.task)
        else:
            own = {name: value.to(device) for name, value in buffers.items()}
            model, left_out = self.forward.copied(flat.to(device), slot.rates, own, state)
            self._note_left_out(left_out)
            return _without_clock(model, slot.rates).eval()
        for name, parameter in model.named_parameters():
            if name in named:
                parameter.data = named[name].clone()
        BufferSlots(model).bind({name: named[name].clone() for name in buffers})
        return model.eval()


def _check_relations(task: Task, graph: Graph) -> None:
    if task.traits is not None and task.traits.relational and not graph.num_relations:
        raise SpecError(
            f"task {task.label!r}: {task.model} needs relations, and the edges of graph {graph.name!r} have none; "
            "give the graph relation=, one number per edge, or choose another model"
        )


def _empty_relations(task: Task, graph: Graph) -> list[str]:
    """A remark on relations without edges, if the model has weights for them."""
    if task.traits is None or not task.traits.relational:
        return []
    empty = [str(relation) for relation, edges in enumerate(graph.stats().relation_edges) if not edges]
    if not empty:
        return []
    shown = ", ".join(empty[:8]) + (f" and {len(empty) - 8} more" if len(empty) > 8 else "")
    return [f"no edge of graph {graph.name!r} has relation {shown}: what {task.model} keeps for it does not train"]


def aggregation_key(task: Task) -> Hashable:
    """Equal for tasks that share the first aggregation of the same features; None: not shared."""
    if task.traits is None:
        return None
    shaping = (getattr(task, name) for name in task.traits.shaping)
    return (task.model, *shaping, identity(tuple(task.model_args.items())))


def _without_clock(model: nn.Module, rates: Sequence[Tensor]) -> nn.Module:
    """The model as the user made it: drawing from torch's generator, with rates that are plain numbers."""
    detach_clock(model)
    _set_stacked(model, False)
    _set_reduce(model, ONE_RANK)
    modules = [module for module in drawing_modules(model) if RATE in module._buffers]
    for module, rate in zip(modules, rates, strict=True):
        if hasattr(module, "p") and float(rate) == 0.0:
            module.p = 0.0
    return model


def _set_stacked(model: nn.Module, stacked: bool) -> None:
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.stacked = stacked


def _set_reduce(model: nn.Module, reduce: Reduce) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (BatchNorm, LayerNorm, Dropout)):
            module.reduce = reduce
        elif reduce.ranks > 1 and isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            raise SpecError(
                f"model {type(model).__name__}: {name} is torch's {type(module).__name__}, which knows the rows of one "
                f"rank only; use weft.nn.BatchNorm to train over {reduce.ranks} ranks"
            )


def _check_frozen(models: list[nn.Module]) -> None:
    """Frozen parameters are shared by all members, so they must be equal."""
    frozen = [{name: p for name, p in model.named_parameters() if not p.requires_grad} for model in models]
    for others in frozen[1:]:
        if any(not value.is_meta and not torch.equal(frozen[0][name], value) for name, value in others.items()):
            raise CannotStack("parameters that do not train differ among them")


def _check_attributes(models: list[nn.Module]) -> None:
    """Attributes of a user's modules are shared by all members, so they must be equal."""
    for other in models[1:]:
        name = unequal(models[0], other)
        if name is not None:
            raise CannotStack(f"their modules differ in {name!r}, which is neither a parameter nor a buffer")


def _check_hooks(models: list[nn.Module]) -> None:
    for name, parameter in models[0].named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CannotStack(f"{name} has a hook on its gradient")


class _model_errors:
    """Turn errors of a model into one sentence that names the task."""

    def __init__(self, task: Task, graph: str) -> None:
        self._task, self._graph = task, graph

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, (WeftError, torch.OutOfMemoryError)):
            return
        raise SpecError(
            f"task {self._task.label!r}: model {self._task.model_name} failed on graph "
            f"{self._graph!r}: {in_one_line(error)} ({place_of(error, self._task.model)})"
        ) from error
