"""compile_stack: compile a stack's forward, loss and backward with Inductor, which fuses between Weft's operators.

Built-in layers leave little to fuse. A user's module may be full of element-wise passes and reductions, PyG's layers of
gathers and scatters; the predicted gain is in :mod:`weft.planner.cost.inductor`.

The stack's own functions are traced below autograd and vmap, with every tensor that they read in its fixed place, and
Weft's operators stay opaque calls. The result takes only the weights, and can be captured as a CUDA graph like the
original. It is used only if it reproduces the losses and gradients.

Shapes: T members, P parameters, N nodes, C classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from weft.core.errors import InputError
from weft.runtime.batches.source import Batch
from weft.runtime.compile.fold_constants import fold_constants
from weft.runtime.compile.module_state import ForbidHostReads, HostReads, ModuleStateCheck
from weft.runtime.device.torch_rng import generator_states, restore_generators
from weft.runtime.step.parameters import Layout
from weft.runtime.step.stack import Stack
from weft.runtime.step.state import put_back

# The whole step becomes a CUDA graph of its own. Sums along rows and columns in one kernel (on since torch 2.10) lost
# the gradient of a layer norm's bias where it is a part of the flat gradient (torch 2.11, H200).
OPTIONS = {"triton.cudagraphs": False, "triton.mix_order_reduction": False}
NEAR = {"fp32": 5e-3, "tf32": 2e-2, "bf16": 1e-1}  # relative to the largest: sums are added up in another order
ASKS = "get value out of a tracing tensor"  # torch's words
LEAST, TINY = 1e-3, 1e-30

Function = Callable[[Tensor], Any]


def compile_stack(stack: Stack, evaluated: bool) -> None:
    """Replace what ``stack`` differentiates, and evaluates if ``evaluated``, by compiled functions.

    Raises :class:`InputError` if that fails or gives other numbers; the stack is then unchanged.
    """
    near = NEAR[stack.tasks[0].precision]
    try:
        with _as_it_was(stack):
            batch = _constant_batch(stack)
            if stack.members.hidden_state is not None:
                raise InputError(stack.members.hidden_state)
            if stack.members.writes:
                raise InputError("it changes its own weights")
            if not stack.members.plain_output:
                raise InputError("it returns more than logits")
            train = _of_any_batch(_compiled(stack, partial(stack.gradients, batch=batch), near))
            logits = _without_gradients(partial(stack.logits, batch=batch))
            infer = _of_any_batch(_compiled(stack, logits, near)) if evaluated else stack.infer
    except (InputError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        asks = ASKS in str(error)
        what = "it reads numbers back from its data" if asks else f"{type(error).__name__}: {_first_line(error)}"
        raise InputError(what) from error
    stack.compiled = train, infer


def _constant_batch(stack: Stack) -> Batch:
    if not stack.source.constant:
        raise InputError("its batches differ from step to step, and a compiled step has its tensors in fixed places")
    return stack.source.example()


def _of_any_batch(function: Function) -> Callable[[Tensor, Batch], Any]:
    """A function of weights as one of weights and a batch: always the batch it was compiled for."""
    return lambda flat, batch: function(flat)


def _compiled(stack: Stack, function: Function, near: float) -> Function:
    flat = stack.state.flat
    with _as_it_was(stack), HostReads() as questions:
        expected = function(flat)  # also builds the forms of the adjacency and work lists
    remembered = ModuleStateCheck(stack.members.model)
    with _as_it_was(stack), ForbidHostReads(), stack.as_function():
        traced = _traced(function, flat)
    remembered.check(traced, questions.asked, stack.state.tensors().values())
    if any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in traced.graph.nodes):
        raise InputError("it draws from torch's generator, and a compiled step would draw other numbers")
    traced = fold_constants(traced, changing=stack.state.tensors().values())
    found = _by_inductor(traced, flat)
    with _as_it_was(stack):
        given = found(flat)
    _compare(given, expected, near, stack.members.layout)
    return found


def _traced(function: Function, flat: Tensor) -> GraphModule:
    """Every operator that ``function(flat)`` runs; tensors in fixed places are attributes."""
    return make_fx(lambda weights: function(weights), tracing_mode="real")(flat)


def _by_inductor(traced: GraphModule, flat: Tensor) -> Function:
    from torch import _inductor  # takes a second to import, and most runs do not need it

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = _inductor.compile(traced, [flat], options=_known(OPTIONS))
        call(flat)  # compiles
    several = len(_outputs(traced)) > 1

    def function(weights: Tensor) -> Any:
        found = call(weights)
        return tuple(found) if several else found[0] if isinstance(found, (tuple, list)) else found

    return function


def _known(options: dict[str, Any]) -> dict[str, Any]:
    """Those of ``options`` that this version of torch has."""
    from torch._inductor import config

    there = config.get_config_copy()
    return {name: value for name, value in options.items() if name in there}


def _outputs(traced: GraphModule) -> Sequence[Any]:
    result = next(node for node in traced.graph.nodes if node.op == "output").args[0]
    return result if isinstance(result, (tuple, list)) else (result,)


def _without_gradients(function: Function) -> Function:
    def call(flat: Tensor) -> Any:
        with torch.no_grad():
            return function(flat)

    return call


def _compare(given: Any, expected: Any, near: float, layout: Layout) -> None:
    """:class:`InputError` unless the compiled step reproduces the original, per member and parameter."""
    if isinstance(expected, Tensor):
        apart = [_apart(mine, true, true) for mine, true in zip(given, expected, strict=True)]
    else:
        (losses, grads), (true_losses, true_grads) = given, expected
        apart = [_apart(losses, true_losses, true_losses)]
        for mine, true in zip(grads, true_grads, strict=True):
            parts = zip(layout.views(mine), layout.views(true), strict=True)
            apart += [_apart(part, true_part, true) for part, true_part in parts]
    worst = float(torch.stack(apart).max())
    if not worst <= near:
        raise InputError(f"compiled, it gives other numbers (by {worst:.1e} of the largest)")


def _apart(mine: Tensor, true: Tensor, whole: Tensor) -> Tensor:
    """The largest difference, relative to the largest of ``true``, or to a thousandth of the ``whole`` it is part of.

    It is infinite unless the same numbers are finite.
    """
    finite = true.isfinite()
    largest = torch.maximum(_largest(true), LEAST * _largest(whole)).clamp(min=TINY)
    difference = _largest((mine - true).where(finite, 0.0)) / largest
    return difference.where((mine.isfinite() == finite).all(), inf)


def _largest(values: Tensor) -> Tensor:
    return values.where(values.isfinite(), 0.0).abs().max().float() if values.numel() else values.new_zeros(()).float()


@contextmanager
def _as_it_was(stack: Stack) -> Iterator[None]:
    """Restore the state of ``stack`` and torch's generators at the end."""
    before = generator_states(stack.device)
    try:
        with put_back(stack.state.tensors().values()):
            yield
    finally:
        restore_generators(before, stack.device)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else "no reason given"
