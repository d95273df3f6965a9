"""Build the members of a stack: their models at true size, and the one model that runs for all of them.

Every member's model is built from its own seed at its own width, then laid out in the flat buffer of the widest.

Shapes: T members, P parameters of the widest model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from weft.core.compatibility import padding_obstacle
from weft.core.errors import SpecError
from weft.core.task import Task
from weft.nn.pyg.swap import drawing
from weft.runtime.batches.source import Source
from weft.runtime.built_stacks import Converted
from weft.runtime.device.precision import DTYPES
from weft.runtime.step.buffers import take_buffers
from weft.runtime.step.forward import Forward, LeafForward
from weft.runtime.step.inputs import Inputs, bind, layers_of, takes_edges
from weft.runtime.step.members.calls import AloneStep
from weft.runtime.step.members.checks import check_frozen, check_norms, check_users_modules, empty_relations
from weft.runtime.step.members.model_builder import ModelBuilder
from weft.runtime.step.members.slot import CannotStack, MemberSlot
from weft.runtime.step.members.stack_modes import rated_modules, set_reduce, set_stacked
from weft.runtime.step.members.trial import Trial
from weft.runtime.step.members.zero_padding import Padding, widths_of
from weft.runtime.step.parameters import Layout, first_layer_prefix, layout_of
from weft.runtime.step.state import State
from weft.runtime.user_modules.converting import convert, convertible
from weft.runtime.user_modules.edge_use import check_edges, unread_edges
from weft.runtime.user_modules.kept.state import KeptState, Snapshot, give_back
from weft.runtime.user_modules.python_state import check_whole, from_tensors, restore_generators, saved_state


class Members:
    """The members of a stack and the model that runs for all of them; see :class:`weft.runtime.step.stack.Stack`.

    What trying them shows (:class:`weft.runtime.step.members.trying.TryOut`): ``hidden_state``, why a captured step
    would not be what the module does; ``plain_output``, whether the model returns one tensor; ``without_gradient``,
    parameters that the loss does not depend on; ``writes``, whether it changes its own weights in a step; ``branches``,
    whether it reads numbers into Python, and so may do something else in a later step;
    ``changed_in_evaluation``, whether evaluations change its buffers; ``rebuilds``,
    whether a copy would not follow its own weights, so that the module is built anew instead; ``converted``, which of
    its layers of PyG are, None if none was tried; of stacks, ``alone``, a step and evaluation of one by itself, and
    ``alone_seconds``, the least that those took on a CPU. ``follows``: whether what the module keeps in Python is
    looked at in every evaluation, since its calls run Python.
    """

    def __init__(self, tasks: Sequence[Task], inputs: Inputs, first_once: bool) -> None:
        widest = max(range(len(tasks)), key=lambda row: tasks[row].hidden)
        self.task, self._first_once = tasks[widest], first_once
        self.builder = ModelBuilder(self.task, inputs)
        models = [self.builder.build_whole(task) for task in tasks]
        self.model = models[widest]  # the one that runs for all of them
        self.hidden_state: str | None = None
        self.plain_output, self.rebuilds = True, False
        self.without_gradient: tuple[str, ...] = ()
        self.writes = self.branches = self.changed_in_evaluation = False
        self.alone_seconds: float | None = None
        self.alone: AloneStep | None = None
        self.converted: Converted | None = None
        self._keeping: KeptState | None = None
        self.follows = inputs.device.type == "cpu"
        check_edges(self.task, inputs.graph)
        if self.is_users:
            check_users_modules(self.task, models, inputs.graph)  # before one of them is set up to run for all
        converted = self._convert_unseen()
        rates = _take_rates(models)
        self._to_try = self._copies_to_try(models, widest)
        set_stacked(self.model, len(tasks) > 1)
        as_pyg = self.builder.sparse and takes_edges(self.model) and not converted
        self.source = self.source_of(dense=self.builder.made_dense or as_pyg)
        set_reduce(self.model, self.source.reduce)
        check_norms(self.task, self.model, self.source)
        self.layout = self._checked_layout(tasks, models)
        wide = take_buffers(self.model)
        if self._to_try and len(tasks) == 1:
            self._keeping = KeptState(self.model, {*self.layout.names, *wide}, self._to_try[0])
        paddings = [self._padding(task, model, wide) for task, model in zip(tasks, models, strict=True)]
        self._initial = self._stacked(models, paddings, wide)
        self.forward = self.forward_of(self.model, alone=len(tasks) == 1)
        self.slots = [MemberSlot(*parts) for parts in zip(tasks, paddings, rates, strict=True)]
        self.notes.extend(empty_relations(self.task, inputs.graph))
        self.notes.extend(unread_edges(self.task, self.model, inputs.graph))

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Row by row."""
        return tuple(slot.task for slot in self.slots)

    @property
    def notes(self) -> list[str]:
        """Remarks for the user."""
        return self.builder.notes

    @property
    def is_users(self) -> bool:
        """Whether the model is a module of the user's own."""
        return self.task.traits is None

    @property
    def layers(self) -> int | None:
        """Layers of the model, if each can be run alone."""
        return layers_of(self.model)

    @property
    def in_first_layer(self) -> list[bool]:
        """Per parameter of the layout, whether it is the first layer's, or of the norm after it (``epilogues.0``)."""
        prefix = first_layer_prefix(self.model)
        return [name.startswith(prefix) or name.split(".")[1:2] == ["0"] for name in self.layout.names]

    @property
    def converts(self) -> bool:
        """Whether the layers of PyG in a user's module may compute with Weft's operators."""
        return self.is_users and self.task.convert is not False

    def initial(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Weights ``[T, P]`` and buffers ``[T, ...]`` before the first epoch; may be taken once."""
        flat, buffers = self._initial
        del self._initial
        return flat, buffers

    def models_to_try(self) -> list[nn.Module]:
        """A user's module per member that may be called before training; none in a dry run. May be taken once."""
        models = self._to_try
        del self._to_try
        return models

    def source_of(self, dense: bool) -> Source:
        """The source of batches of the shared model."""
        return self.builder.source(self.model, dense, self._first_once)

    def forward_of(self, model: nn.Module, alone: bool) -> Forward:
        """``model`` as a function of weights; a user's module alone trains with its own parameters."""
        dtype, reduce = DTYPES[self.task.precision], self.source.reduce
        plain = dtype == torch.float32 and reduce.ranks == 1
        if self.is_users and alone and plain:
            skips = self.task.has_own("optimizer") and self.task.accumulate == 1
            return LeafForward(model, self.layout, bind(model), reduce, skips)
        return Forward(model, self.layout, bind(model), dtype, reduce)

    def attach(self, state: State) -> None:
        """Bind the clocks and buffers of ``state``, and all members' dropout rates, to the model."""
        self.forward.attach(state, [torch.stack(column) for column in zip(*(s.rates for s in self.slots), strict=True)])

    def learn(self, trial: Trial) -> None:
        """Keep what a trial of the first member tells of the module."""
        self.hidden_state = trial.hidden_state
        if self._keeping is not None:
            self._keeping.learn(trial.unread, trial.caches, trial.lost, trial.needs_lost)
        self.branches, self.changed_in_evaluation = trial.branches, trial.changed_in_evaluation
        self.without_gradient, self.writes = trial.without_gradient, trial.writes
        self.forward.expect(trial.without_gradient, varies=trial.hidden_state is not None or trial.branches)
        if trial.without_gradient:
            self.layout = self.layout.without_decay(trial.without_gradient)

    def convert(self, found: Converted, others: Sequence[nn.Module] = ()) -> None:
        """Convert layers of PyG in the shared model and in ``others``; features stay sparse if they may."""
        if found.sparse:
            dense = self.source.example().x
            self.source = self.source_of(dense=False)
            self.builder.inputs.release(dense)
        for model in (self.model, *others):
            convert(model, found.layers)
        self.converted = found

    def kept(self) -> Snapshot | None:
        """What the module keeps in Python now, for its evaluation to be repeated; None if that is not looked at."""
        if self._keeping is None or not (self.follows or self.hidden_state is not None):
            return None
        return self._keeping.now()

    def python_state(self) -> dict[str, Tensor]:
        """What the module keeps in Python between calls, for a checkpoint; empty if that is not looked at."""
        kept = self.kept()
        return {} if kept is None else saved_state(kept)

    def restore_python_state(self, saved: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`python_state`."""
        if self._keeping is not None:
            check_whole(self.model, saved)
            self._keeping.restore(from_tensors(saved))
            restore_generators(saved)

    def as_it_was(self) -> AbstractContextManager[None]:
        """Inside, the module may be called: afterwards it keeps what it kept before."""
        return nullcontext() if self._keeping is None else self._keeping.put_back()

    def left_out_buffers(self) -> set[str]:
        """Buffers of a user's module that its ``state_dict`` leaves out."""
        if not self.is_users:
            return set()
        places = ((name, part) for name, part in self.model.named_modules())
        return {f"{n}.{key}" if n else key for n, part in places for key in part._non_persistent_buffers_set}

    def put_kept(self, model: nn.Module, kept: Snapshot) -> None:
        """Make a copy of the module, as it is now, one that keeps what this one has ``kept`` before."""
        if self._keeping is not None:
            give_back(model, self._keeping.on_copy(kept), strict=False)

    def select(self, rows: Sequence[int]) -> None:
        """Keep only the members in ``rows``."""
        self.slots = [self.slots[row] for row in rows]

    def tensors_of(
        self, slot: MemberSlot, flat: Tensor, buffers: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """``(flat [Q], buffers)`` at the true size of a member, from its padded ``flat [P]`` and buffers."""
        padding = slot.padding
        if padding is None:
            return flat, buffers
        return padding.narrow(flat), {name: padding.narrow_buffer(name, value) for name, value in buffers.items()}

    def named(self, slot: MemberSlot, flat: Tensor, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same by the names that the model's ``state_dict`` uses, contiguous."""
        flat, buffers = self.tensors_of(slot, flat, buffers)
        layout = self.layout if slot.padding is None else slot.padding.layout(self.layout)
        return {**{name: value.contiguous() for name, value in layout.named(flat).items()}, **buffers}

    # ---- building ------------------------------------------------------------------------------------

    def _convert_unseen(self) -> bool:
        """In a dry run there is nothing to compare: convert as a run would, if it is equal."""
        if not self.converts or self.builder.inputs.device.type != "meta":
            return False
        found = convertible(self.model, asked=self.task.convert is True)
        if not found.layers:
            return False
        but = " but masks of attention" if drawing(self.model, found.layers) else ""
        self.notes.append(f"{found.counted()} of PyG to be converted, if that changes no number{but}")
        convert(self.model, found.layers)
        return True

    def _copies_to_try(self, models: list[nn.Module], widest: int) -> list[nn.Module]:
        """A module to try for every member: its own, and a copy of the one that runs for all."""
        if not self.is_users or self.builder.inputs.device.type == "meta":
            return []
        return [self.builder.build_again(model) if row == widest else model for row, model in enumerate(models)]

    def _checked_layout(self, tasks: Sequence[Task], models: list[nn.Module]) -> Layout:
        decaying = next((task for task in tasks if task.weight_decay), tasks[0])
        layout = layout_of(self.model, decaying.decay)
        if not layout.names:
            task = self.task
            raise SpecError(f"task {task.label!r}: model {task.model_name} has no trainable parameters")
        if any(layout_of(model, "all").names != layout.names for model in models):
            raise CannotStack("their models have different parameters")
        if len(models) > 1:
            check_frozen(models)
        return layout.turning(self._over_sparse_features(layout))

    def _over_sparse_features(self, layout: Layout) -> list[str]:
        """Weights that sparse features are multiplied by: SpMM reads their transposes and gives such gradients."""
        if self.is_users or not self.builder.sparse or not self.source.constant or self.source.reduce.ranks > 1:
            return []
        if self.task.has_own("optimizer"):  # which may take for granted that parameters are contiguous
            return []
        prefix, features = first_layer_prefix(self.model), self.builder.graph.num_features
        shapes = zip(layout.names, layout.shapes, strict=True)
        return [n for n, shape in shapes if n.startswith(prefix) and len(shape) == 2 and shape[1] == features]

    def _padding(self, task: Task, model: nn.Module, wide_buffers: dict[str, Tensor]) -> Padding | None:
        narrow = {name: p.shape for name, p in model.named_parameters()}
        wide = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        if all(narrow[name] == shape for name, shape in wide.items()):
            return None
        reason = padding_obstacle(task)
        if reason is not None:
            raise CannotStack(f"their widths differ, and {reason}")
        buffers = {name: (b.shape, wide_buffers[name].shape) for name, b in take_buffers(model).items()}
        widths, turned = widths_of(task, self.task.hidden), self.layout.turned_names
        return Padding(widths, narrow, wide, buffers, self.builder.inputs.device, turned)

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


def _take_rates(models: list[nn.Module]) -> list[tuple[Tensor, ...]]:
    """Every member's dropout rates; the shared model drops wherever one of the members does."""
    found = [rated_modules(model) for model in models]
    if len({len(modules) for modules in found}) > 1:
        raise CannotStack("their models have different random modules")
    rates = [tuple(module.rate.clone() for module in modules) for modules in found]
    for same_place in zip(*found, strict=True):
        most = max(getattr(module, "p", 0.0) for module in same_place)
        for module in same_place:
            if hasattr(module, "p") and module.p == 0.0:
                module.p = most
    return rates
