"""Forward: a model as a function of the flat parameters of one member, or of many under ``vmap``.

Shapes: T members, P parameters, N nodes, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.batches.source import Batch
from weft.core.errors import SpecError, TrainingError
from weft.nn.models import is_named_model
from weft.ops.launch.backend import on_gpu
from weft.ops.reduce import ONE_RANK, Reduce
from weft.runtime.modules.copying import copy_module
from weft.runtime.modules.layers import CountedDropout, StackedRows, TallLinear, has_own_products
from weft.runtime.modules.state import followers
from weft.runtime.step.losses import with_member
from weft.runtime.step.parameters import BufferSlots, ClockSlots, Layout, Slots, drawing_modules, take_buffers
from weft.runtime.step.state import State

# ---- Differentiate losses with given slopes, without what ``torch.autograd.grad`` imports on the way.


def gradient(losses: Tensor, leaf: Tensor, slopes: Tensor) -> Tensor:
    """The gradient of ``losses [T]`` in ``leaf``, each loss with its slope.

    ``torch.autograd.grad`` compares the shapes of losses and slopes with torch's symbolic shapes, which imports sympy:
    half a second. They are equal here, and the engine is called as it calls it.
    """
    run = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if run is None:  # another version of torch
        return torch.autograd.grad(losses, leaf, slopes)[0]
    if losses.shape != slopes.shape:
        raise RuntimeError(f"losses of shape {list(losses.shape)} need slopes of that shape, not {list(slopes.shape)}")
    gradients: Tensor = run((losses,), (slopes,), False, False, (leaf,), False, accumulate_grad=False)[0]
    return gradients


def backward(losses: Tensor, slopes: Tensor, inputs: Sequence[Tensor] = ()) -> None:
    """``losses.backward(slopes)`` into all leaves, or into ``inputs``.

    Torch's own functions leave modes (:class:`torch.overrides.TorchFunctionMode`) on the way, so that these do not see
    what hooks do; the engine does not.
    """
    run = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if run is None:  # another version of torch
        torch.autograd.backward(losses, slopes, inputs=list(inputs) or None)
        return
    run((losses,), (slopes,), False, False, tuple(inputs), True, accumulate_grad=True)


Loss = Callable[[Any, Batch], Tensor]


class Forward:
    """``forward(flat [T, P], training, batch) -> logits [T, N, C]``, with the clocks and buffers of an attached state.

    ``call(batch)`` runs the model on a batch; ``dtype`` is the type of weights and activations. The batch is
    the same for all members, so it stays outside of ``vmap`` and is never copied T times.
    One member needs no ``vmap``: on small graphs that would cost a CPU run more than the arithmetic.
    A user's model draws the masks of its dropout from the clock
    (:class:`weft.runtime.modules.layers.CountedDropout`), and
    on a GPU its dense layers are Weft's products (:class:`weft.runtime.modules.layers.TallLinear`), on a CPU
    a stack fetches and adds rows of all tasks at once (:class:`weft.runtime.modules.layers.StackedRows`).
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        call: Callable[[Batch], Tensor],
        dtype: torch.dtype = torch.float32,
        reduce: Reduce = ONE_RANK,
    ) -> None:
        self.model, self.layout, self.call, self._dtype, self._reduce = model, layout, call, dtype, reduce
        self._set_mode = mode_switch(model)
        self._built_in, self._own_products = is_named_model(model), has_own_products(model)
        self._first_site = len(drawing_modules(model))  # their own sites come first
        self.around: AbstractContextManager[Any] = nullcontext()  # a trial watches a user's module, both ways
        self.without_gradient: tuple[str, ...] | None = None  # names of parameters, if that is checked
        self._reached: set[int] | None = None  # indices of parameters with a gradient, if every step is checked
        self._slots, self._buffers, self._clocks = Slots(model, layout.names), BufferSlots(model), ClockSlots(model)

    def attach(self, state: State, rates: Sequence[Tensor]) -> None:
        """Read clocks and buffers from ``state``, dropout rates from ``rates`` (one ``[T]`` per random module)."""
        self._state, self._rates = state, list(rates)
        if state.members == 1:
            self._row = {name: buffer[0] for name, buffer in state.buffers.items()}
            self._clock = state.clock[0]
            self._bind(self._clock, [rate[0] for rate in rates], self._row)

    def __call__(self, flat: Tensor, training: bool, batch: Batch) -> Tensor:
        """Logits, with dropout and batch statistics when ``training``."""
        if flat.shape[0] == 1:
            # a view: taking row 0 would have a backward of its own
            return with_member(self.one(flat.view(-1), training, batch))
        self._set_mode(training)
        weights = self.layout.copies(flat.to(self._dtype))
        mapped = weights, self._state.clock, self._rates, self._state.buffers
        with _without_fallback_warnings():
            if batch.layer:  # from the second layer on every member has features of its own
                return torch.vmap(lambda *member: self._one(*member[:-1], batch=replace(batch, x=member[-1])))(
                    *mapped, batch.x
                )
            return torch.vmap(partial(self._one, batch=batch))(*mapped)

    def one(self, flat: Tensor, training: bool, batch: Batch) -> Tensor:
        """The model's logits ``[N, C]`` for the weights ``flat [P]`` of a state with one member."""
        self._set_mode(training)
        weights = self.layout.views(flat.to(self._dtype))
        if self._reached is not None and training and torch.is_grad_enabled():
            for index, weight in enumerate(weights):
                weight.register_hook(partial(self._note_gradient, index))
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
        if self._reached is not None:
            self._reached.clear()
        losses = loss(self(leaf, training=True, batch=batch), batch)
        with self.around:
            grads = gradient(losses, leaf, slopes)
        if self._reached is not None:
            self._check_without([name for index, name in enumerate(self.layout.names) if index not in self._reached])
        return losses.detach(), grads

    def look_at_gradients(self) -> None:
        """From now on see which parameters have a gradient in a step of one member."""
        self._reached = set()

    def expect(self, without_gradient: Sequence[str], varies: bool) -> None:
        """Parameters are ``without_gradient`` in a trial; if they might vary, every step of one member is checked."""
        self.without_gradient = tuple(without_gradient)
        self._reached = set() if varies and not self._built_in and self._reduce.ranks == 1 else None

    def _note_gradient(self, index: int, grad: Tensor | None) -> None:
        if grad is not None and self._reached is not None:
            self._reached.add(index)

    def _check_without(self, names: Sequence[str]) -> None:
        """A :class:`TrainingError` if other parameters are without a gradient than in the last step.

        Torch's optimizers skip a parameter without a gradient; here one table of numbers serves all parameters.
        """
        without = tuple(names)
        if self.without_gradient is not None and without != self.without_gradient:
            changed = sorted(set(without) ^ set(self.without_gradient))
            raise TrainingError(
                f"model {type(self.model).__name__}: {', '.join(changed)} had a gradient in some steps and none in "
                "others; torch would skip such an update, which Weft's optimizers cannot: give a class of torch.optim "
                "as optimizer, in fp32 and without accumulate, or let forward always use them, if only times 0"
            )
        self.without_gradient = without

    def copied(
        self, flat: Tensor, rates: Sequence[Tensor], buffers: dict[str, Tensor], state: State
    ) -> tuple[nn.Module, list[str]]:
        """A copy of the model with weights of its own, and the names of what could not be copied.

        ``state`` is attached again.
        """
        self._slots.bind([nn.Parameter(view.clone()) for view in self.layout.views(flat)])
        nothing = torch.empty(0, dtype=torch.int64)  # a clock of torch's own generator
        self._bind(nothing, [rate.clone() for rate in rates], {name: b.clone() for name, b in buffers.items()})
        try:
            return copy_module(self.model)
        finally:
            self.attach(state, self._rates)

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
        with CountedDropout(clock, self._first_site, self._reduce), replacing, self.around:
            return self.call(batch)

    def _bind(self, clock: Tensor, rates: Sequence[Tensor], buffers: dict[str, Tensor]) -> None:
        self._clocks.bind(clock, rates)
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
    they do in torch. Which parameters had no gradient in the last step is in :attr:`without_gradient`; they may be
    others in every step if the update can skip them (``may_skip``).
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        call: Callable[[Batch], Tensor],
        reduce: Reduce = ONE_RANK,
        may_skip: bool = False,
    ) -> None:
        super().__init__(model, layout, call, torch.float32, reduce)
        self._may_skip = may_skip
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
        self._follow_buffers(self._row)

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
        self._check_same_gradients(grads)
        return losses.detach(), self.layout.flat_of(
            [torch.zeros_like(p) if g is None else g for p, g in zip(self._parameters, grads, strict=True)]
        )[None]

    def look_at_gradients(self) -> None:
        """They are, in every step."""

    def expect(self, without_gradient: Sequence[str], varies: bool) -> None:
        """As :meth:`Forward.expect`; every step is checked."""
        self.without_gradient = tuple(without_gradient)

    def copied(
        self, flat: Tensor, rates: Sequence[Tensor], buffers: dict[str, Tensor], state: State
    ) -> tuple[nn.Module, list[str]]:
        """As :meth:`Forward.copied`; whatever else holds a parameter has the copy's own."""
        self._point(flat.clone())
        buffer_copies = {name: value.clone() for name, value in buffers.items()}
        self._bind(torch.empty(0, dtype=torch.int64), [rate.clone() for rate in rates], buffer_copies)
        self._follow_buffers(buffer_copies)
        try:
            return copy_module(self.model)
        finally:
            self.attach(state, self._rates)

    @contextmanager
    def as_function(self) -> Iterator[Forward]:
        """The same model as a function of its weights, as a trace needs it."""
        plain = Forward(self.model, self.layout, self.call, self._dtype, self._reduce)
        plain.attach(self._state, self._rates)
        try:
            yield plain
        finally:
            self.attach(self._state, self._rates)

    def _point(self, flat: Tensor) -> None:
        """Make the parameters views of ``flat [P]``."""
        self._own = self.layout.views(flat.detach())
        for parameter, view in zip(self._parameters, self._own, strict=True):
            parameter.data = view
        for follower in self._followers:
            if follower.owner not in self._row:
                follower.follow(self._own[self.layout.names.index(follower.owner)])

    def _follow_buffers(self, buffers: Mapping[str, Tensor]) -> None:
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

    def _leave(self, owners: Sequence[str]) -> None:
        """Give memory of its own to what was in that of ``owners``, which the module has replaced."""
        for follower in self._followers:
            if follower.owner in owners:
                follower.tensor.data = follower.tensor.data.clone()
        self._followers = [follower for follower in self._followers if follower.owner not in owners]

    def _check_same_gradients(self, grads: Sequence[Tensor | None]) -> None:
        """As :meth:`_check_without`; and no parameter that was frozen may have thawed, nor a gradient be sparse."""
        thawed = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if thawed:
            raise TrainingError(
                f"model {type(self.model).__name__}: {', '.join(thawed)} began without requires_grad and has it now; "
                "only parameters that have it from the start are trained"
            )
        sparse = [name for name, g in zip(self.layout.names, grads, strict=True) if g is not None and g.is_sparse]
        if sparse:
            raise SpecError(
                f"model {type(self.model).__name__}: the gradient of {', '.join(sparse)} is sparse, which Weft's flat "
                "gradients cannot be; leave out sparse=True"
            )
        without = tuple(name for name, g in zip(self.layout.names, grads, strict=True) if g is None)
        if self._may_skip:
            self.without_gradient = without
        else:
            self._check_without(without)


def mode_switch(model: nn.Module) -> Callable[[bool], object]:
    """What ``model.train(mode)`` and ``model.eval()`` do, in a fraction of the time, over the modules of the moment."""
    own_eval = type(model).eval is not nn.Module.eval or "eval" in vars(model)

    def set_mode(training: bool) -> None:
        if own_eval and not training:
            model.eval()
        else:
            _set_mode(model, training)

    return set_mode


def _set_mode(module: nn.Module, training: bool) -> None:
    overridden = type(module).train is not nn.Module.train or "train" in module.__dict__
    if overridden or isinstance(module, torch.jit.ScriptModule):  # whose mode is not in Python
        module.train(training)
        return
    module.__dict__["training"] = training
    for child in module._modules.values():
        if child is not None:
            _set_mode(child, training)


@contextmanager
def _without_fallback_warnings() -> Iterator[None]:
    """Operators that torch can only run member by member do so silently: the user's module chose them, not the user."""
    functorch = torch._C._functorch
    functorch._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_warning_enabled(True)
