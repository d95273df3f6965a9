"""Build the members of a stack: their models at true size, and the one model that runs for all of them.

Every member's model is built from its own seed at its own width, then laid out in the flat buffer of the widest.

Shapes: T members, P parameters of the widest model.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from weft.batches.source import Features, Source
from weft.core.compatibility import padding_obstacle
from weft.core.errors import SpecError
from weft.core.settings import identity
from weft.core.task import Task
from weft.core.wording import option
from weft.graph.graph import Graph
from weft.graph.sparse_features import SparseFeatures
from weft.nn.epilogue import BatchNorm, Dropout, LayerNorm
from weft.nn.pyg.convert import Swaps, possible_swaps, restore, swap
from weft.ops.reduce import ONE_RANK, Reduce
from weft.runtime.device.process import DTYPES, same_draws
from weft.runtime.modules.build import as_written, build_model, copy_module, is_compiled
from weft.runtime.modules.convert import Converted, conversion_of
from weft.runtime.modules.settings import (
    GIVEN,
    call_style,
    check_call,
    check_edges,
    given_of_edges,
    model_errors,
    parameters_of,
    unread_edges,
)
from weft.runtime.modules.state import (
    GlobalsSnapshot,
    ModuleState,
    StateReader,
    WeightMemory,
    followers,
    opaque_marks,
    python_generators,
    restore_python_generators,
    restore_state,
    saved_text,
)
from weft.runtime.step.forward import (
    RATE,
    BufferSlots,
    Forward,
    Layout,
    LeafForward,
    drawing_modules,
    first_layer_prefix,
    layout_of,
    take_buffers,
)
from weft.runtime.step.inputs import Inputs, bind, layers_of, takes_blocks, takes_edges
from weft.runtime.step.state import State

if TYPE_CHECKING:
    from weft.runtime.step.preflight import Calls

# ---- Pad narrow models with zeros: where the weights of a narrow model are in those of a wide one.
#
# Padded weights start at 0 and stay there: what they multiply or add to is 0, and so is their gradient, as long as the
# activation keeps 0 at 0 and nothing takes a mean over the width, as LayerNorm does, whose widths are not padded. So a
# padded member trains exactly as it would alone.
#
# Shapes: P parameters of the wide model, Q of the narrow one.


class Padding:
    """One member's tensors in the layout of the wide model: by name for buffers, flat for parameters.

    ``widths``: the hidden width of the narrow and of the wide model, both of them ``heads`` parts side by side;
    ``turned``: parameters that lie transposed in both (:class:`weft.runtime.step.forward.Layout`).
    """

    def __init__(
        self, widths: tuple[int, int], heads: int, narrow: Mapping[str, Sequence[int]],
        wide: Mapping[str, Sequence[int]], buffers: Mapping[str, tuple[Sequence[int], Sequence[int]]],
        device: torch.device, turned: Collection[str] = (),
    ) -> None:  # fmt: skip

        def along(small: int, large: int) -> Tensor:
            """Where the ``small`` indices of one dimension lie among its ``large`` ones."""
            if small == large or (small * heads, large * heads) == widths:
                return torch.arange(small)
            if (small, large) != widths:
                raise ValueError(f"a dimension of {small} does not become {large} when {widths[0]} is padded")
            head = torch.arange(heads)[:, None] * (large // heads)
            return (head + torch.arange(small // heads)).flatten()

        def inside(own: Sequence[int], padded: Sequence[int]) -> Tensor:
            """Flat places of the elements of a tensor of shape ``own`` in one of shape ``padded``."""
            index = torch.zeros((), dtype=torch.int64)
            for small, large in zip(own, padded, strict=True):
                index = index[..., None] * large + along(small, large)
            return index.flatten()

        parts, start = [], 0
        for name, shape in wide.items():
            order = -1 if name in turned else 1
            parts.append(inside(narrow[name][::order], shape[::order]) + start)
            start += torch.Size(shape).numel()
        self._total, self._shapes = start, {name: tuple(shape) for name, shape in narrow.items()}
        self._flat = torch.cat(parts).to(device)
        self._buffers = {
            name: (inside(*shapes).to(device), tuple(shapes[0]), tuple(shapes[1])) for name, shapes in buffers.items()
        }

    @property
    def parameters(self) -> int:
        """Q."""
        return self._flat.numel()

    def layout(self, wide: Layout) -> Layout:
        """The layout of the narrow model, from that of the wide one."""
        return replace(wide, shapes=tuple(torch.Size(self._shapes[name]) for name in wide.names))

    def widen(self, flat: Tensor) -> Tensor:
        """``flat [Q]`` in ``[P]``, zeros elsewhere."""
        return flat.new_zeros(self._total).index_copy(0, self._flat.to(flat.device), flat)

    def narrow(self, flat: Tensor) -> Tensor:
        """The inverse: ``[P]`` to ``[Q]``."""
        return flat.index_select(0, self._flat.to(flat.device))

    def widen_buffer(self, name: str, value: Tensor) -> Tensor:
        """A buffer of the narrow model in the shape of the wide one's, zeros elsewhere."""
        positions, _, wide = self._buffers[name]
        zeros = value.new_zeros(torch.Size(wide).numel())
        return zeros.index_copy(0, positions.to(value.device), value.flatten()).reshape(wide)

    def own_shape(self, name: str) -> torch.Size:
        """The shape of a buffer of the narrow model."""
        return torch.Size(self._buffers[name][1])

    def narrow_buffer(self, name: str, value: Tensor) -> Tensor:
        """The inverse."""
        positions, narrow, _ = self._buffers[name]
        return value.flatten().index_select(0, positions.to(value.device)).reshape(narrow)


# ---- MemberSlot: what a stack keeps of one member; CannotStack: why tasks are not one stack.


class CannotStack(Exception):
    """Raised for tasks that cannot be one stack, with the reason; each of them may still train by itself."""


@dataclass(frozen=True)
class MemberSlot:
    """One member of a stack: its task, how its width is padded (None: not at all), and its dropout rates."""

    task: Task
    padding: Padding | None
    rates: tuple[Tensor, ...]


@dataclass
class Findings:
    """What calls of a user's module before training have shown (:class:`weft.runtime.step.preflight.Preflight`).

    ``hidden_state``: why a call depends on earlier ones, None if it does not; ``unsaved``: what it depends on though no
    file can hold it, empty if nothing, and ``evaluates``: whether evaluations do without that. ``without_gradient``:
    names of parameters that the loss does not depend on; ``sparse``: those with sparse gradients; ``writes``: whether
    calls change the module's own weights; ``branches``: whether they read numbers into Python;
    ``changed_in_evaluation``: whether evaluations change buffers. ``unread``: names of opaque attributes that calls
    change and no result depends on; ``draws``: generators that calls draw from.
    """

    hidden_state: str | None = None
    unsaved: str = ""
    evaluates: bool = True
    without_gradient: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    writes: bool = False
    branches: bool = False
    changed_in_evaluation: bool = False
    unread: frozenset[str] = frozenset()
    draws: frozenset[str] = frozenset()

    @property
    def varies(self) -> bool:
        """Whether a later step may do something else than the first."""
        return self.hidden_state is not None or self.branches


# ---- Tell the modules of a model how they run: for several members or one, over several ranks or one, counted or not.


def set_up(model: nn.Module, reduce: Reduce, stacked: bool = False) -> None:
    """Set how norms and dropout join the rows of ranks, and whether batch norms see the members of a stack.

    A :class:`SpecError` for norms that cannot join rows.
    """
    for name, module in model.named_modules():
        if isinstance(module, BatchNorm):
            module.stacked = stacked
        if isinstance(module, (BatchNorm, LayerNorm, Dropout)):
            module.reduce = reduce
        elif reduce.ranks > 1 and isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            raise SpecError(
                f"model {type(model).__name__}: {name} is torch's {type(module).__name__}, which knows the rows of one "
                f"rank only; use weft.nn.BatchNorm to train over {reduce.ranks} ranks"
            )


def rated_modules(model: nn.Module) -> list[nn.Module]:
    """The random modules that have a rate of their own."""
    return [module for module in drawing_modules(model) if RATE in module._buffers]


# ---- Checks of members' models before they are one stack: what Weft cannot train, and what several cannot share.


def check_users_modules(task: Task, models: list[nn.Module], graph: Graph) -> None:
    """Refuse what cannot be trained as written; :class:`CannotStack` for what several members cannot share."""
    model = models[0]
    check_call(task, model, graph.adj)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    meta = any(p.is_meta or nn.parameter.is_lazy(p) for p in model.parameters())
    for pair in () if meta else WeightMemory(model).shared():
        owner, name = sorted(pair, key=lambda name: name not in trained)
        if owner in trained:
            raise SpecError(
                f"task {task.label!r}: {name} of model {task.model_name} is in the memory of the parameter {owner}, so "
                "that an update of one would change the other; let it be the same parameter, or a .clone() of it"
            )
    if len(models) == 1:
        return
    # Several have to be equal in everything that a stack has once for all of them.
    for follower in followers(models[0], dict((*models[0].named_parameters(), *models[0].named_buffers()))):
        raise CannotStack(f"{follower.name} is in the memory of {follower.owner}, which every member has one of")
    for name, part in models[0].named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise CannotStack(f"{name or 'their module'} went through torch.jit, which several cannot share")
    states = [StateReader(model, dict((*model.named_parameters(), *model.named_buffers())))() for model in models]
    marks = [opaque_marks(model, state.opaque) for model, state in zip(models, states, strict=True)]
    for state, mark in zip(states[1:], marks[1:], strict=True):
        differing = state.differences(states[0])
        differing += [name for name in mark if name in marks[0] and mark[name] != marks[0][name]]
        differing += sorted(state.opaque.keys() ^ states[0].opaque.keys())
        if differing:
            raise CannotStack(f"their modules differ in {differing[0]!r}, which is neither a parameter nor a buffer")
    for name, parameter in models[0].named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CannotStack(f"{name} has a hook on its gradient")


def check_frozen(models: Sequence[nn.Module], trained: Collection[str]) -> None:
    """A :class:`CannotStack` if parameters that are not ``trained``, which members share, differ among ``models``."""
    frozen = [{n: p for n, p in nn.Module.named_parameters(model) if n not in trained} for model in models]
    for of_member in frozen[1:]:
        pairs = [(frozen[0].get(name), value) for name, value in of_member.items()]
        if any(first is None or (not value.is_meta and not torch.equal(first, value)) for first, value in pairs):
            raise CannotStack("parameters that do not train differ among them")


class Members:
    """The members of a stack and the model that runs for all of them; see :class:`weft.runtime.step.stack.Stack`.

    ``initial``: weights ``[T, P]`` and buffers ``[T, ...]`` before the first epoch, which the stack takes over;
    ``findings``: what calls before training have shown; ``plain_output``: whether the model returns one tensor;
    ``rebuilds``: whether a copy would not follow its own weights, so that the module is built anew instead;
    ``converted``: which of its layers of PyG are converted, None for built-in models; ``made_dense``:
    whether sparse features are, since the model does not take them; of stacks, ``alone``: a step and evaluation of one
    by itself, and ``alone_seconds``: the least that those took on a CPU.
    """

    def __init__(self, tasks: Sequence[Task], inputs: Inputs, first_once: bool) -> None:
        widest = max(range(len(tasks)), key=lambda row: tasks[row].hidden)
        self.task, self._first_once = tasks[widest], first_once
        self.inputs, self.graph = inputs, inputs.graph
        self.notes: list[str] = []  # remarks for the user
        self.made_dense = False
        models = [self.build_whole(task) for task in tasks]
        self.model = models[widest]  # the one that runs for all of them
        self.findings = Findings()
        self.plain_output, self.rebuilds = True, False
        self.alone_seconds: float | None = None
        self.alone: Calls | None = None
        self.converted: Converted | None = None
        self._reader: StateReader | None = None
        self.globals: GlobalsSnapshot | None = None  # if its numbers depend on what it changes outside
        check_edges(self.task, inputs.graph)
        if self.is_users:
            check_users_modules(self.task, models, inputs.graph)  # before one of them is set up to run for all
        observer = sys.modules.get("weft.capture.observer")  # a run that is not planned does without
        dry_run = inputs.device.type == "meta" or (observer is not None and observer.is_dry_run())
        self.to_try: list[nn.Module] = []  # a user's module per member that may be called before training
        if self.is_users and not dry_run:  # the widest one is built again, since its own model runs for all
            self.to_try = [self.build_again(m, self.task) if m is self.model else m for m in models]
        as_pyg = self.sparse and takes_edges(self.model)
        self.source = self.source_of(dense=self.made_dense or as_pyg)
        self._convert(models, dry_run and as_pyg)
        rated = [rated_modules(model) for model in models]
        if len({len(modules) for modules in rated}) > 1:
            raise CannotStack("their models have different random modules")
        rates = [tuple(module.rate.clone() for module in modules) for modules in rated]
        for same_place in zip(*rated, strict=True):  # the shared model drops wherever one of the members does
            most = max(getattr(module, "p", 0.0) for module in same_place)
            for module in same_place:
                if hasattr(module, "p") and module.p == 0.0:
                    module.p = most
        set_up(self.model, self.source.reduce, stacked=len(tasks) > 1)
        shared_batches = self.source.reduce.ranks > 1 and not self.source.constant
        for norm in self.model.modules() if shared_batches else ():  # nodes that several ranks have would count twice
            if isinstance(norm, BatchNorm) or (isinstance(norm, LayerNorm) and norm.mode == "graph"):
                kind = "a batch norm" if isinstance(norm, BatchNorm) else "a layer norm with mode='graph'"
                raise SpecError(
                    f"task {self.task.label!r}: {kind} does not go with sampled training over ranks, which share the "
                    "nodes of a batch; use a layer norm of each node (norm='layer'), or one rank"
                )
        self.layout = self._checked_layout(tasks, models)
        wide = take_buffers(self.model)
        if self.to_try and len(tasks) == 1:
            self._reader = StateReader(self.model, {*self.layout.names, *wide})
            self._marks: dict[str, bytes] | None = None
        paddings = [self._padding(task, model, wide) for task, model in zip(tasks, models, strict=True)]
        self.initial = self._stacked(models, paddings, wide)
        self.forward = self.forward_of(self.model, alone=len(tasks) == 1)
        self.slots = [MemberSlot(*parts) for parts in zip(tasks, paddings, rates, strict=True)]
        if self.task.traits is not None and self.task.traits.relational:
            empty = [str(relation) for relation, edges in enumerate(self.graph.stats().relation_edges) if not edges]
            shown = ", ".join(empty[:8]) + (f" and {len(empty) - 8} more" if len(empty) > 8 else "")
            note = f"no edge of graph {self.graph.name!r} has relation {shown}: what {self.task.model} keeps for it "
            self.notes += [note + "does not train"] if empty else []
        self.notes.extend(unread_edges(self.task, self.model, inputs.graph))
        if self.is_users and dry_run:  # for the plan: the style follows from the names of forward's parameters
            self.notes.append(f"{self.task.model_name}.forward is called with {GIVEN[call_style(self.model)]}")

    @property
    def sparse(self) -> bool:
        """Whether the graph's features are."""
        return isinstance(self.graph.x, SparseFeatures)

    @property
    def is_users(self) -> bool:
        """Whether the model is a module of the user's own."""
        return self.task.traits is None

    @property
    def layers(self) -> int | None:
        """Layers of the model, if each can be run alone."""
        return layers_of(self.model)

    # ---- models --------------------------------------------------------------------------------------

    def build_whole(self, task: Task) -> nn.Module:
        """The model of ``task`` from its own seed, at its own width, its lazy layers initialised if it has any."""
        device, graph = self.inputs.device, self.graph
        # A dry run needs no values, and drawing those of many members takes longer than the rest.
        with device if device.type == "meta" and task.traits is not None else nullcontext():
            if task.traits is not None and task.traits.relational and not graph.num_relations:
                raise SpecError(
                    f"task {task.label!r}: {task.model} needs relations, and the edges of graph {graph.name!r} have "
                    "none; give the graph relation=, one number per edge, or choose another model"
                )
            model = build_model(task, graph.num_features, graph.num_classes, graph.num_relations)
            if any(is_compiled(part, scripted=False) for part in model.modules()):
                model = as_written(model)
                self.note_once(f"{task.model_name} trains as written, without torch.compile; compile= compiles steps")
            model = model.to(device)
        if any(nn.parameter.is_lazy(p) for p in model.parameters()):
            try:
                self._call_lazy(model, task, dense=self.made_dense or (self.sparse and takes_edges(model)))
            except SpecError as error:
                self.note_dense(error)
                self._call_lazy(model, task, dense=True)
        return model

    def _call_lazy(self, model: nn.Module, task: Task, dense: bool) -> None:
        outside = GlobalsSnapshot(model)  # which a dry run, and calls before the first epoch, leave as it is
        with torch.no_grad(), model_errors(task, self.graph.name), outside.fresh_caches():
            try:
                bind(model.eval())(self._source_for(model, self._features(dense)).example())
            finally:
                outside.restore()

    def build_again(self, model: nn.Module, task: Task) -> nn.Module:
        """The module of ``task`` again: built anew, or a copy of the object that the task has."""
        if isinstance(task.model, nn.Module):
            return self.copied(model)
        with same_draws(self.inputs.device):
            return self.build_whole(task)

    def copied(self, model: nn.Module) -> nn.Module:
        """A copy of a user's module; a :class:`SpecError` if it cannot be copied."""
        try:
            return copy_module(model)[0]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise self.cannot_copy(f"{type(error).__name__}: {error}") from error

    def cannot_copy(self, why: str) -> SpecError:
        """The error for a module that cannot be copied."""
        task = self.task
        return SpecError(
            f"task {task.label!r}: model {task.model_name} cannot be copied, so its best weights could not be "
            f"given back: {why}"
        )

    # ---- batches -------------------------------------------------------------------------------------

    def _features(self, dense: bool) -> Features:
        return self.inputs.features(self.task.feature_norm, DTYPES[self.task.precision], dense)

    def note_dense(self, error: SpecError) -> None:
        """Add a note that features are made dense, if that may help a user's model that failed with ``error``."""
        if not self.sparse or self.task.traits is not None or error.__cause__ is None or self.made_dense:
            raise error
        self.made_dense = True
        self.notes.append(f"features made dense: the model does not take sparse ones ({error.__cause__})")

    def source_of(self, dense: bool) -> Source:
        """The source of batches of the shared model; with its first aggregation if that is computed once."""
        task, x, first = self.task, self._features(dense), None
        if self._first_once:  # tasks of one key share the first aggregation of the same features; None: not shared
            key = task.traits and (
                task.model,
                *(getattr(task, name) for name in task.traits.shaping),
                identity(tuple(task.model_args.items())),
            )
            first = self.inputs.first(self.model, x, key)
        over_rows = any(isinstance(module, BatchNorm) for module in self.model.modules())
        return self._source_for(self.model, x, first, padding=task.traits is not None and not over_rows)

    def _source_for(self, model: nn.Module, x: Features, first: Tensor | None = None, padding: bool = False) -> Source:
        of_edges = given_of_edges(self.task, model, self.graph.adj)
        return self.inputs.source(x, first, not takes_blocks(model), padding, of_edges)

    # ---- the model of all members and its findings -------------------------------------------------

    def note_once(self, note: str) -> None:
        """Add a remark for the user, unless it is there."""
        self.notes += [note] if note not in self.notes else []

    def forward_of(self, model: nn.Module, alone: bool, reduce: Reduce | None = None) -> Forward:
        """``model`` as a function of weights; a user's module alone trains with its own parameters."""
        dtype, reduce = DTYPES[self.task.precision], reduce or self.source.reduce
        plain = dtype == torch.float32 and reduce.ranks == 1
        if self.is_users and alone and plain:
            return LeafForward(model, self.layout, reduce)
        return Forward(model, self.layout, dtype, reduce)

    def attach(self, state: State) -> None:
        """Bind the clocks and buffers of ``state``, and all members' dropout rates, to the model."""
        self.forward.attach(state, [torch.stack(column) for column in zip(*(s.rates for s in self.slots), strict=True)])

    def learn(self, findings: Findings) -> None:
        """Keep what calls of the first member's module have shown."""
        self.findings = findings
        self.forward.expect(findings.without_gradient, findings.varies)
        if self._reader is not None:
            names = [name for name in self._reader().opaque if name not in findings.unread]
            owners = {name: type(self.model.get_submodule(name.rpartition(".")[0])) for name in names}
            undeclared = [n for n in names if owners[n].get_extra_state is nn.Module.get_extra_state]
            self._marks = opaque_marks(self.model, undeclared)

    def use_sparse(self) -> None:
        """Let features stay sparse, which were made dense for layers of PyG."""
        assert self.converted is not None
        dense = self.source.example().x
        self.source = self.source_of(dense=False)
        self.inputs.release(dense)
        note = self.converted.note  # as it is: what resumes this run adds the rest again
        self.notes[:] = [f"{text}, features stay sparse" if text == note else text for text in self.notes]
        self.converted = replace(self.converted, sparse=True)

    def module_state(self) -> ModuleState | None:
        """The plain data of a user's module that trains alone; None of others."""
        return None if self._reader is None else self._reader()

    def saved_state(self) -> dict[str, Tensor]:
        """The plain data of a user's module for a checkpoint, with the states of Python's and NumPy's generators."""
        state = self.module_state()
        if state is None:
            return {}
        unsaved = self.findings.unsaved
        if not unsaved and self._marks:  # what a later call has begun to change
            now = opaque_marks(self.model, self._marks)
            unsaved = next((name for name in now if now[name] != self._marks[name]), "")
        return replace(state, unsaved=unsaved).to_tensors({"generators": python_generators()})

    def restore_saved_state(self, saved: Mapping[str, Tensor]) -> None:
        """The inverse of :meth:`saved_state`; a :class:`SpecError` if something could not be saved."""
        if self._reader is None:
            return
        state, text = ModuleState.from_tensors(saved), saved_text(saved)
        if state.unsaved:
            raise SpecError(
                f"task {self.task.label!r}: model {self.task.model_name} keeps {state.unsaved!r} between calls, which "
                "is not plain data and in no checkpoint, so its training cannot be resumed: return it from "
                "get_extra_state and take it back in set_extra_state, or start afresh with overwrite"
            )
        restore_state(self.model, state)
        if "generators" in text:
            restore_python_generators(text["generators"])

    def named(self, slot: MemberSlot, flat: Tensor, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        """A member's tensors at their true size by the names of its ``state_dict``, from padded ``flat [P]``."""
        layout, padding = self.layout, slot.padding
        if padding is not None:
            layout, flat = padding.layout(layout), padding.narrow(flat)
            buffers = {name: padding.narrow_buffer(name, value) for name, value in buffers.items()}
        return {**{name: value.contiguous() for name, value in layout.named(flat).items()}, **buffers}

    def model_of(
        self, slot: MemberSlot, flat: Tensor, buffers: dict[str, Tensor], as_written: bool = True
    ) -> nn.Module:
        """A member's model of its own with these padded weights, in evaluation mode, outside of any stack.

        ``as_written``: converted layers are PyG's again, as in the module that the user wrote.
        """
        device, task = self.inputs.device, slot.task
        if self.is_users and not self.rebuilds:
            on_device = {name: value.to(device) for name, value in buffers.items()}
            model, left_out = self.forward.copied(flat.to(device), slot.rates, on_device)
            if left_out:
                text = f"left out of the trained model, since they cannot be copied: {', '.join(left_out)}"
                self.note_once(text)
            set_up(model, ONE_RANK)
            for module, rate in zip(rated_modules(model), slot.rates, strict=True):
                if hasattr(module, "p") and float(rate) == 0.0:
                    module.p = 0.0
        else:
            named = {name: value.to(device) for name, value in self.named(slot, flat, buffers).items()}
            with same_draws(device) if self.is_users else nullcontext():
                model = self.build_whole(task)
            for name, parameter in model.named_parameters():
                if name in named:
                    parameter.data = named[name].clone()
            BufferSlots(model).bind({name: named[name].clone() for name in buffers})
        if as_written:
            restore(model)
        return model.eval()

    # ---- building ------------------------------------------------------------------------------------

    def _convert(self, models: Sequence[nn.Module], sparse: bool) -> None:
        """Convert layers of PyG in all modules; ``sparse``: features then stay so in a dry run, which tries nothing."""
        inputs, requested, ranks = self.inputs, self.task.convert is True, self.source.reduce.ranks
        over_ranks = ranks > 1 and takes_edges(self.model)
        if not self.is_users or (self.task.convert is False if ranks == 1 else not over_ranks):
            return
        sampled = inputs.device.type == "cuda" and not self.source.constant
        here = conversion_of(self.model, requested, sampled)
        if call_style(self.model) == "transposed" and here.layers:  # PyG adds loops to a matrix in another way
            here = Converted(note="not converted: its layers get adj_t, and not edge_index" if requested else None)
        self.converted = here if inputs.converted is None else inputs.converted
        possible = possible_swaps(self.model, draws=requested)
        if over_ranks:
            self._check_all_converted(possible, ranks)
        for name, kind in self.converted.layers.items():
            if possible.layers.get(name) != kind:
                why = possible.kept.get(name, f"there is {possible.layers.get(name, 'none')} now")
                raise SpecError(
                    f"task {self.task.label!r}: was trained with {kind} {name!r} of model {self.task.model_name} on "
                    f"Weft's operators, which cannot be done again: {why}; resume with what it was trained with, or "
                    f"choose another {option('out')} to start afresh"
                )
        if self.converted.sparse and not self.sparse:
            raise SpecError(
                f"task {self.task.label!r}: was trained with sparse features, and those of graph "
                f"{self.graph.name!r} are dense now; resume with what it was trained with, or choose another "
                f"{option('out')} to start afresh"
            )
        layered = (*models, *self.to_try) if self.converted.layers else ()
        for model in {id(model): model for model in layered}.values():
            swap(model, self.converted.layers, builds=False)
        self.notes.extend([] if self.converted.note is None else [self.converted.note])
        if sparse and self.converted.layers:
            self.source = self.source_of(dense=self.made_dense)

    def _check_all_converted(self, possible: Swaps, ranks: int) -> None:
        """A :class:`SpecError` for a module that takes edge_index and has anything but converted layers of PyG.

        Only those see the edges from nodes of other ranks.
        """
        assert self.converted is not None
        style, attributed = call_style(self.model), self.inputs.graph.stats().edge_features is not None
        reasons = ["it takes adj_t"] if style == "transposed" else []
        reasons += ["convert=False"] if self.task.convert is False else list(possible.kept.values())
        reasons += [] if self.converted.layers else [self.converted.note or "it has no layers of PyG"]
        if attributed and (style == "data" or "edge_attr" in parameters_of(self.model)):
            reasons = ["shards have no edge_attr"]
        if reasons:
            raise SpecError(
                f"task {self.task.label!r}: model {self.task.model_name} takes edge_index and would miss the nodes of "
                f"other ranks ({reasons[0]}); train it on one rank, not {ranks}, or write it over weft.nn layers"
            )

    def _checked_layout(self, tasks: Sequence[Task], models: list[nn.Module]) -> Layout:
        decaying = next((task for task in tasks if task.weight_decay), tasks[0])
        layout = layout_of(self.model, decaying.decay)
        if not layout.names:
            task = self.task
            raise SpecError(f"task {task.label!r}: model {task.model_name} has no trainable parameters")
        if any(layout_of(model, "all").names != layout.names for model in models):
            raise CannotStack("their models have different parameters")
        check_frozen(models, layout.names)
        for name, dtype in layout.other_kinds.items():
            kind = f"parameter {name} of model {self.task.model_name} is {str(dtype).removeprefix('torch.')}"
            if DTYPES[self.task.precision] != torch.float32 or self.source.reduce.ranks > 1:
                raise SpecError(f"task {self.task.label!r}: {kind}, which trains in precision='fp32' on one rank alone")
            if len(models) > 1:
                raise CannotStack(kind)
        return replace(layout, turned=tuple(self._over_sparse_features(layout)))

    def _over_sparse_features(self, layout: Layout) -> list[str]:
        """Weights that sparse features are multiplied by: SpMM reads their transposes and gives such gradients."""
        own = self.task.has_own("optimizer")  # which may take for granted that parameters are contiguous
        if self.is_users or own or not self.sparse or not self.source.constant or self.source.reduce.ranks > 1:
            return []
        prefix, features = first_layer_prefix(self.model), self.graph.num_features
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
        heads = task.heads if task.traits is not None and task.traits.has_heads else 1
        widths, turned = (task.hidden, self.task.hidden), self.layout.turned
        return Padding(widths, heads, narrow, wide, buffers, self.inputs.device, turned)

    def row_of(self, task: Task, buffers: Mapping[str, Tensor]) -> tuple[MemberSlot, Tensor, dict[str, Tensor]]:
        """The slot of ``task``, and its weights ``[1, P]`` and buffers ``[1, ...]`` as the stack has them.

        ``buffers``: of all members, by name. :class:`CannotStack` for a task that is not like the others.
        """
        model = self.build_whole(task)
        if self.is_users:  # it runs through the module that is there, whose attributes are those of this one
            with same_draws(self.inputs.device):
                alike = [self.build_whole(self.task), model]
            check_users_modules(task, alike, self.graph)
            check_frozen(alike, self.layout.names)
        rates = tuple(module.rate.clone() for module in rated_modules(model))
        if layout_of(model, "all").names != self.layout.names or len(rates) != len(self.slots[0].rates):
            raise CannotStack("its model has other parts than those of the stack")
        wide = {name: buffer[0] for name, buffer in buffers.items()}
        slot = MemberSlot(task, self._padding(task, model, wide), rates)
        return slot, *self._stacked([model], [slot.padding], wide)

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
