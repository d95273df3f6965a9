"""Forward: a model as a function of the flat parameters of one member, or of many under ``vmap``.

All trainable parameters of a model are one flat float32 buffer, so that an update is one launch on a GPU, and keeping
the best weights one copy. It is float64 if one of them is.

Shapes: T members, P parameters in all, N nodes, C classes; a leading ``...`` is for tasks that share a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

from weft.batches.source import Batch
from weft.core.errors import SpecError, TrainingError
from weft.nn.models import is_named_model
from weft.ops.dense.linear import split_rows
from weft.ops.launch.backend import on_gpu
from weft.ops.reduce import ONE_RANK, Reduce
from weft.runtime.modules.build import copy_module
from weft.runtime.modules.layers import CountedDropout, StackedRows, TallLinear, has_own_products
from weft.runtime.modules.state import followers
from weft.runtime.step.inputs import bind
from weft.runtime.step.losses import with_member
from weft.runtime.step.state import State

# ---- The flat buffer: where each parameter is in it, and the slots of a model that its parts are bound to.


@dataclass(frozen=True)
class Layout:
    """Where each named parameter is in the flat buffer ``[..., P]``, and whether weight decay applies to it.

    A ``turned`` parameter ``[O, I]`` lies there transposed, for kernels that read it so: its view is transposed back,
    and neither its use nor its gradient needs a copy. On a small graph a copy takes as long as a layer: a step of a
    two-layer GCN on cora has 21 launches on a GPU; it had 26 before this, Adam's own look-up of rates, a loss in one
    program and dense weights without copies. Checkpoints have all in their own order (:meth:`in_order`).
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    decayed: tuple[bool, ...]

    kinds: tuple[torch.dtype, ...] = ()  # of each; all float32 if empty
    turned: tuple[str, ...] = ()  # names

    @cached_property
    def sizes(self) -> list[int]:
        """Numbers of each parameter: a complex one has two per element."""
        kinds = self.kinds or (torch.float32,) * len(self.shapes)
        return [prod(shape) * (2 if kind.is_complex else 1) for shape, kind in zip(self.shapes, kinds, strict=True)]

    @cached_property
    def other_kinds(self) -> dict[str, torch.dtype]:
        """Parameters that are neither float32 nor complex64: views of all are then copies of their own types."""
        named = zip(self.names, self.kinds, strict=False)
        return {name: kind for name, kind in named if kind not in (torch.float32, torch.complex64)}

    @cached_property
    def dtype(self) -> torch.dtype:
        """Of the flat buffer: it holds every parameter's numbers exactly."""
        return torch.float64 if {torch.float64, torch.complex128} & {*self.kinds} else torch.float32

    @property
    def total(self) -> int:
        """P."""
        return sum(self.sizes)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter as a view of ``flat [..., P]``.

        One split, because its backward is one concatenation; slices would each make a P-long gradient.
        """
        views = self._shaped(flat.split(self.sizes, dim=-1), flat.shape[:-1])
        return [view.to(kind) for view, kind in zip(views, self.kinds, strict=True)] if self.other_kinds else views

    def copies(self, flat: Tensor) -> list[Tensor]:
        """Each parameter ``[T, *shape]`` of ``flat [T, P]``, contiguous: all of them copied in one pass."""
        return self._shaped(split_rows(flat, self.sizes), (flat.shape[0],))

    def _shaped(self, parts: Sequence[Tensor], lead: Sequence[int]) -> list[Tensor]:
        tensors = []
        for index, (part, own_shape) in enumerate(zip(parts, self.shapes, strict=True)):
            shape = (*lead, *own_shape)
            if self.kinds and self.kinds[index].is_complex:
                pairs = part.view((*shape, 2))
                # A complex view needs an even offset, which the second row of an odd length does not have.
                odd = pairs.storage_offset() % 2 or any(stride % 2 for stride in pairs.stride()[:-1])
                tensors.append(torch.view_as_complex(pairs.clone() if odd else pairs))
            elif self.names[index] in self.turned:
                tensors.append(part.view((*shape[:-2], shape[-1], shape[-2])).mT)
            else:
                tensors.append(part.view(shape))
        return tensors

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The flat buffer ``[P]`` that holds ``tensors``."""
        return self.flat_of([tensors[name].detach() for name in self.names]) if self.names else torch.zeros(0)

    def flat_of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The flat buffer ``[P]`` of ``tensors`` in the order of ``names``."""
        parts = []
        for index, tensor in enumerate(tensors):
            real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            real = real.mT if self.names[index] in self.turned else real
            parts.append(real.reshape(-1).to(self.dtype))
        return torch.cat(parts)

    def in_order(self, flat: Tensor) -> Tensor:
        """``flat [P]`` with turned parameters in the order of their own elements, as checkpoints have them."""
        return replace(self, turned=()).flat_of(self.views(flat)) if self.turned else flat

    def laid_out(self, flat: Tensor) -> Tensor:
        """The inverse of :meth:`in_order`."""
        return self.flat_of(replace(self, turned=()).views(flat)) if self.turned else flat

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """The views of ``flat [P]`` by name."""
        return dict(zip(self.names, self.views(flat), strict=True))

    def decay_mask(self) -> Tensor | None:
        """``[P]`` 1 where weight decay applies and 0 elsewhere; None if it applies everywhere."""
        if all(self.decayed):
            return None
        parts = [torch.full((n,), float(d)) for n, d in zip(self.sizes, self.decayed, strict=True)]
        return torch.cat(parts)


def layout_of(model: nn.Module, decay: str) -> Layout:
    """The layout of ``model``'s trainable parameters; ``decay`` is ``"all"`` or ``"first"`` (layer).

    Complex ones come first: two numbers each, they are views of a row only where an even number is before them.
    """
    named = [(name, p) for name, p in nn.Module.named_parameters(model) if p.requires_grad]
    if (
        type(model).parameters is not nn.Module.parameters
        or type(model).named_parameters is not nn.Module.named_parameters
    ):
        listed = {id(p) for p in model.parameters()}  # what a plain loop gives to its optimizer
        unknown = listed - {id(p) for _, p in nn.Module.named_parameters(model)}
        if unknown:
            raise SpecError(
                f"parameters() of model {type(model).__name__} returns {len(unknown)} tensors that are no registered "
                "parameters of it: register them (self.name = nn.Parameter(...))"
            )
        named = [(name, p) for name, p in named if id(p) in listed]
    trained = dict(sorted(named, key=lambda pair: not pair[1].is_complex()))
    prefix, kinds = "" if decay == "all" else first_layer_prefix(model), tuple(p.dtype for p in trained.values())
    return Layout(
        names=tuple(trained),
        shapes=tuple(p.shape for p in trained.values()),
        decayed=tuple(name.startswith(prefix) for name in trained),
        kinds=kinds if {*kinds} != {torch.float32} else (),
    )


def first_layer_prefix(model: nn.Module) -> str:
    """The name prefix of the first layer: the first child with parameters, or the first of a list of them."""
    prefix, module = "", model
    while True:
        children = [(n, c) for n, c in module.named_children() if any(True for _ in c.parameters())]
        if not children or (prefix and not isinstance(module, (nn.ModuleList, nn.Sequential))):
            return prefix
        name, module = children[0]
        prefix += name + "."


class Slots:
    """The slots of a model's trained parameters, tied ones included.

    Binding replaces the parameters by any tensors, as ``torch.func.functional_call`` does; writing to the
    modules' own tables costs a microsecond per parameter instead of a traversal of the model per call.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        position = {name: index for index, name in enumerate(names)}
        owner = {id(p): position[n] for n, p in nn.Module.named_parameters(model) if n in position}
        self._slots = [
            (module._parameters, key, owner[id(p)])
            for module in model.modules()
            for key, p in module._parameters.items()
            if p is not None and id(p) in owner
        ]

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """Bind ``tensors``, in the order of ``names``, in place of the parameters."""
        for table, key, index in self._slots:
            table[key] = tensors[index]


# ---- A model's buffers as part of the training state: BatchNorm's statistics, and the clock of dropout.

CLOCK, RATE = "clock", "rate"


def _buffer_slots(model: nn.Module) -> Iterator[tuple[dict[str, Tensor], str, str]]:
    """Table, key and full name of every buffer that training may change; one that has several names goes by the first.

    A module with a clock has no other buffers than those that a runner binds (its dropout rate).
    """
    first: dict[int, str] = {}
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and CLOCK not in module._buffers:
                name = f"{prefix}.{key}" if prefix else key
                yield module._buffers, key, first.setdefault(id(buffer), name)


def take_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the model's buffers by name, in a layout of their own; clocks are not among them."""
    buffers = {name: table[key] for table, key, name in _buffer_slots(model)}
    return {name: buffer.detach().clone().contiguous() for name, buffer in buffers.items()}


def drawing_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that read a clock (and a ``rate``, where they have one), in the order of ``model.modules()``."""
    return [module for module in model.modules() if CLOCK in module._buffers]


class BufferSlots:
    """The slots of a model's buffers."""

    def __init__(self, model: nn.Module) -> None:
        self._slots = list(_buffer_slots(model))

    def bind(self, buffers: Mapping[str, Tensor]) -> None:
        """Bind ``buffers`` to the model, which then updates them in place."""
        for table, key, name in self._slots:
            if name in buffers:  # else it was None at first, and is no part of the state
                table[key] = buffers[name]

    def replaced(self, buffers: Mapping[str, Tensor]) -> list[str]:
        """Names of buffers that a module replaced instead of updating in place."""
        return [name for table, key, name in self._slots if name in buffers and table[key] is not buffers[name]]

    def collect(self, buffers: Mapping[str, Tensor]) -> None:
        """Copy back buffers that a module replaced instead of updating in place.

        Raises :class:`TrainingError` if the new one cannot be copied into the one of the training state.
        """
        for table, key, name in self._slots:
            if name not in buffers or table[key] is buffers[name]:
                continue
            new, old = table[key], buffers[name]
            if new is None:
                raise TrainingError(f"buffer {name!r} became None in a call; the training state keeps its first kind")
            kinds = [(tensor.is_floating_point(), tensor.is_complex()) for tensor in (old, new)]
            if new.shape != old.shape or kinds[0] != kinds[1]:
                was, now = (f"{list(t.shape)} of {str(t.dtype).removeprefix('torch.')}" for t in (old, new))
                raise TrainingError(
                    f"buffer {name!r} was {was} and a call replaced it by {now}; give it that shape and type from the "
                    "start"
                )
            old.copy_(new)
            table[key] = old


# ---- The model as a function.


def backward(losses: Tensor, slopes: Tensor, inputs: Sequence[Tensor] = ()) -> None:
    """``losses.backward(slopes)`` into all leaves, or into ``inputs``.

    Torch's own function leaves modes (:class:`torch.overrides.TorchFunctionMode`) on the way, so that these do not see
    what hooks do; the engine does not.
    """
    _engine_run_backward((losses,), (slopes,), False, False, tuple(inputs), True, accumulate_grad=True)


Loss = Callable[[Any, Batch], Tensor]


class Forward:
    """``forward(flat [T, P], training, batch) -> logits [T, N, C]``, with the clocks and buffers of an attached state.

    ``dtype`` is the type of weights and activations. The batch is the same for all members, so it stays outside of
    ``vmap`` and is never copied T times. One member needs no ``vmap``: on small graphs that would cost a CPU run more
    than the arithmetic. A user's model draws the masks of its dropout from the clock
    (:class:`weft.runtime.modules.layers.CountedDropout`), and on a GPU its dense layers are Weft's products
    (:class:`weft.runtime.modules.layers.TallLinear`), on a CPU a stack fetches and adds rows of all tasks at once
    (:class:`weft.runtime.modules.layers.StackedRows`).
    """

    def __init__(
        self, model: nn.Module, layout: Layout, dtype: torch.dtype = torch.float32, reduce: Reduce = ONE_RANK
    ) -> None:
        self.model, self.layout, self.call, self._dtype, self._reduce = model, layout, bind(model), dtype, reduce
        self._own_eval = type(model).eval is not nn.Module.eval or "eval" in vars(model)
        self._built_in, self._own_products = is_named_model(model), has_own_products(model)
        self._clocks = [module._buffers for module in drawing_modules(model)]  # their own sites come first
        self._rated = [table for table in self._clocks if RATE in table]
        self.around: AbstractContextManager[Any] = nullcontext()  # a trial watches a user's module, both ways
        self.without_gradient: tuple[str, ...] = ()  # names of parameters, in the last step
        self.sparse: tuple[str, ...] = ()  # those whose gradient was sparse
        self._grads: list[Tensor | None] = []  # in the last step, where a flat buffer would change them
        self.reached: set[int] | None = None  # indices of parameters with a gradient, if those may vary
        self._slots, self._buffers = Slots(model, layout.names), BufferSlots(model)

    def attach(self, state: State, rates: Sequence[Tensor]) -> None:
        """Read clocks and buffers from ``state``, dropout rates from ``rates`` (one ``[T]`` per random module)."""
        self._state, self._rates = state, list(rates)
        if state.members == 1:
            self._row = {name: buffer[0] for name, buffer in state.buffers.items()}
            self._clock = state.clock[0]
            self._bind(self._clock, [rate[0] for rate in rates], self._row)

    def fill(self, row: int, rates: Sequence[Tensor]) -> None:
        """Set the dropout rates of the member in ``row``."""
        for all_rates, rate in zip(self._rates, rates, strict=True):
            all_rates[row].copy_(rate)

    def __call__(self, flat: Tensor, training: bool, batch: Batch) -> Tensor:
        """Logits, with dropout and batch statistics when ``training``."""
        if flat.shape[0] == 1:
            # a view: taking row 0 would have a backward of its own
            return with_member(self.one(flat.view(-1), training, batch))
        self._set_mode(training)
        weights = self.layout.copies(flat.to(self._dtype))
        mapped = weights, self._state.clock, self._rates, self._state.buffers
        # Operators that torch can only run member by member do so silently: the user's module chose them, not the user.
        torch._C._functorch._set_vmap_fallback_warning_enabled(False)
        try:
            if batch.layer:  # from the second layer on every member has features of its own
                return torch.vmap(lambda *member: self._one(*member[:-1], batch=replace(batch, x=member[-1])))(
                    *mapped, batch.x
                )
            return torch.vmap(partial(self._one, batch=batch))(*mapped)
        finally:
            torch._C._functorch._set_vmap_fallback_warning_enabled(True)

    def one(self, flat: Tensor, training: bool, batch: Batch) -> Tensor:
        """The model's logits ``[N, C]`` for the weights ``flat [P]`` of a state with one member."""
        self._set_mode(training)
        weights = self.layout.views(flat.to(self._dtype))
        if self.reached is not None and training and torch.is_grad_enabled():
            for index, weight in enumerate(weights):
                weight.register_hook(lambda grad, at=index: None if grad is None else self.reached.add(at))
        self._slots.bind(weights)
        logits = self._called(self._clock, replace(batch, x=batch.x[0]) if batch.layer else batch)
        self._buffers.collect(self._row)
        return logits

    def gradients(self, flat: Tensor, batch: Batch, loss: Loss, slopes: Tensor) -> tuple[Tensor, Tensor]:
        """Losses ``[T]`` at the weights ``flat [T, P]``, and the gradients ``[T, P]`` of their sum.

        Each loss has a slope of 1 in the sum: a member whose loss is NaN does not affect the others. The ones are given
        as ``slopes``, so neither the sum nor its gradient is computed.
        """
        leaf = flat.detach().requires_grad_()
        if self.reached is not None:
            self.reached.clear()
        losses = loss(self(leaf, training=True, batch=batch), batch)
        # ``torch.autograd.grad`` imports sympy to compare shapes, which are equal here: half a second.
        with self.around:
            (grads,) = _engine_run_backward((losses,), (slopes,), False, False, (leaf,), False, accumulate_grad=False)
        if self.reached is not None and flat.shape[0] == 1:
            counts = [float(index in self.reached) for index in range(len(self.layout.names))]
            if self._reduce.ranks > 1:  # a gradient on one of them is a gradient
                counts = self._reduce.sum(torch.tensor(counts, device=flat.device)).tolist()
            self.without_gradient = tuple(n for n, count in zip(self.layout.names, counts, strict=True) if not count)
        return losses.detach(), grads

    def grads(self, flat: Tensor) -> list[Tensor | None]:
        """The gradient ``flat [P]`` of the last step in parts, as torch made them; None where there was none."""
        named = self.layout.named(flat)
        return self._grads or [None if name in self.without_gradient else grad for name, grad in named.items()]

    def expect(self, without_gradient: Sequence[str], varies: bool) -> None:
        """Parameters are ``without_gradient`` in a trial; every step of one member looks, over ranks if that varies."""
        self.without_gradient = tuple(without_gradient)
        self.reached = set() if not self._built_in and (varies or self._reduce.ranks == 1) else None

    def copied(self, flat: Tensor, rates: Sequence[Tensor], buffers: dict[str, Tensor]) -> tuple[nn.Module, list[str]]:
        """A copy of the model with weights of its own, and the names of what could not be copied."""
        self._hold(flat)
        nothing = torch.empty(0, dtype=torch.int64)  # a clock of torch's own generator, which the copy draws from
        self._bind(nothing, [rate.clone() for rate in rates], {name: b.clone() for name, b in buffers.items()})
        try:
            return copy_module(self.model)
        finally:
            self.attach(self._state, self._rates)

    def _hold(self, flat: Tensor) -> None:
        """Let the model have parameters with the numbers of ``flat [P]``."""
        self._slots.bind([nn.Parameter(view.clone()) for view in self.layout.views(flat)])

    def _set_mode(self, training: bool) -> None:
        """What ``model.train(mode)`` and ``model.eval()`` do, in a fraction of the time."""
        if self._own_eval and not training:
            self.model.eval()
        else:
            _set_mode(self.model, training)

    def _called(self, clock: Tensor, batch: Batch) -> Tensor:
        """The model's logits; in a user's model, Weft's dropout replaces torch's.

        So do its products on a GPU; on a CPU, rows of all tasks of a stack are fetched at once.
        """
        if self._built_in:
            return self.call(batch)
        replacing: AbstractContextManager[Any] = nullcontext()
        if self._own_products and on_gpu(clock):
            replacing = TallLinear()
        elif self._own_products and self._state.members > 1:
            replacing = StackedRows()
        with CountedDropout(clock, len(self._clocks), self._reduce), replacing, self.around:
            return self.call(batch)

    def _bind(self, clock: Tensor, rates: Sequence[Tensor], buffers: dict[str, Tensor]) -> None:
        for table in self._clocks:  # (seed, step) for random modules, and the rate of those that have one
            table[CLOCK] = clock
        for table, rate in zip(self._rated, rates, strict=True):
            table[RATE] = rate
        self._buffers.bind(buffers)

    def _one(
        self, weights: list[Tensor], clock: Tensor, rates: list[Tensor], buffers: dict[str, Tensor], batch: Batch
    ) -> Tensor:
        """One member, as ``vmap`` sees it; its buffers change in place, and so do those of all members."""
        self._slots.bind(weights)
        self._bind(clock, rates, buffers)
        logits = self._called(clock, batch)
        self._buffers.collect(buffers)
        return logits


class LeafForward(Forward):
    """A user's module of one member as a plain loop of torch has it: its parameters stay the objects that they are.

    They are views of the flat buffer, so that the update is still one operation. Hooks on parameters, parameters that
    a module keeps in a list or a closure, ``weight.data = ...``, ``max_norm`` and reentrant checkpoints then do what
    they do in torch.
    """

    def __init__(self, model: nn.Module, layout: Layout, reduce: Reduce = ONE_RANK) -> None:
        super().__init__(model, layout, torch.float32, reduce)
        by_name = dict(nn.Module.named_parameters(model))
        self._parameters = [by_name[name] for name in layout.names]
        unlisted = {name: p for name, p in by_name.items() if name not in layout.names}
        self._frozen = {name: p for name, p in unlisted.items() if not p.requires_grad}
        # Gradients of parameters that an overridden parameters() leaves out would add up from step to step.
        self._inputs = self._parameters if len(self._frozen) < len(unlisted) else ()
        self._followers = followers(model, {*layout.names, *take_buffers(model)})

    def attach(self, state: State, rates: Sequence[Tensor]) -> None:
        """As :meth:`Forward.attach`; the parameters become views of the state's weights."""
        super().attach(state, rates)
        self._slots.bind(self._parameters)
        self._point(state.flat[0])

    def one(self, flat: Tensor, training: bool, batch: Batch) -> Tensor:
        """The model's logits ``[N, C]`` for the weights ``flat [P]``."""
        self._set_mode(training)
        self._point(flat)
        logits = self._called(self._clock, replace(batch, x=batch.x[0]) if batch.layer else batch)
        self._take_replaced()
        if self._followers:
            self._leave(self._buffers.replaced(self._row))
        self._buffers.collect(self._row)
        return logits

    def gradients(self, flat: Tensor, batch: Batch, loss: Loss, slopes: Tensor) -> tuple[Tensor, Tensor]:
        """As :meth:`Forward.gradients`, by a backward pass into the parameters."""
        for parameter in self._parameters:
            parameter.grad = None
        losses = loss(self(flat, training=True, batch=batch), batch)
        with self.around:
            backward(losses, slopes, self._inputs)
        self._take_replaced()
        grads = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None  # a captured step would hold them in addition to the flat gradient
        thawed = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if thawed:
            raise TrainingError(
                f"model {type(self.model).__name__}: {', '.join(thawed)} began without requires_grad and has it now; "
                "only parameters that have it from the start are trained"
            )
        named = dict(zip(self.layout.names, grads, strict=True))
        self.without_gradient = tuple(name for name, g in named.items() if g is None)
        self.sparse = tuple(name for name, g in named.items() if g is not None and g.is_sparse)
        self._grads = grads if self.sparse or self.layout.other_kinds else []
        pairs = zip(self._parameters, grads, strict=True)
        dense = [torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g for p, g in pairs]
        return losses.detach(), self.layout.flat_of(dense)[None]

    def _point(self, flat: Tensor) -> None:
        """Make the parameters views of ``flat [P]``."""
        self._flat = flat.detach()
        self._own = self.layout.views(self._flat)
        for parameter, view in zip(self._parameters, self._own, strict=True):
            parameter.data = view
        for follower in self._followers:
            if follower.owner not in self._row:
                follower.follow(self._own[self.layout.names.index(follower.owner)])

    def _hold(self, flat: Tensor) -> None:
        self._point(flat.clone())  # whatever else holds a parameter has the copy's own

    def _bind(self, clock: Tensor, rates: Sequence[Tensor], buffers: dict[str, Tensor]) -> None:
        super()._bind(clock, rates, buffers)
        for follower in self._followers:
            if follower.owner in buffers:
                follower.follow(buffers[follower.owner])

    def _take_replaced(self) -> None:
        """Take over what the module assigned to a parameter's ``data``."""
        for index, (parameter, view) in enumerate(zip(self._parameters, self._own, strict=True)):
            if parameter.data_ptr() != view.data_ptr() or parameter.stride() != view.stride():
                self._leave([self.layout.names[index]])
                view.copy_(parameter.data)
                parameter.data = view
        if self.layout.other_kinds:
            self._flat.copy_(self.layout.flat_of(self._own))

    def _leave(self, owners: Sequence[str]) -> None:
        """Give memory of its own to what was in that of ``owners``, which the module has replaced."""
        for follower in self._followers:
            if follower.owner in owners:
                follower.tensor.data = follower.tensor.data.clone()
        self._followers = [follower for follower in self._followers if follower.owner not in owners]


def _set_mode(module: nn.Module, training: bool) -> None:
    overridden = type(module).train is not nn.Module.train or "train" in module.__dict__
    if overridden or isinstance(module, torch.jit.ScriptModule):  # whose mode is not in Python
        module.train(training)
        return
    module.__dict__["training"] = training
    for child in module._modules.values():
        if child is not None:
            _set_mode(child, training)
