"""compile_stack: a stack's forward, loss and backward through Inductor, which fuses what lies between Weft's operators.

Built-in layers leave it next to nothing. A user's module may be full of element-wise passes and reductions, PyG's
layers of gathers and scatters; what the plan expects of it is in :mod:`weft.plan.compiling`.

The stack's own functions are traced below autograd and vmap, with every tensor that they read in its fixed place, and
Weft's operators stay the calls that they are. What comes out takes the weights and nothing else, and can be recorded as
a CUDA graph like what it was made from. It is trusted once it has given the same losses and gradients.

Shapes: T members, P parameters, N nodes, C classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from weft.capture.weave_record import put_back
from weft.core.errors import InputError
from weft.run.constants import fold_constants
from weft.run.randomness import generator_states, restore_generators
from weft.run.stack import Stack

OPTIONS = {"triton.cudagraphs": False}  # the whole step becomes one
NEAR = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 5e-2}  # relative to the largest: sums are added up in another order

Function = Callable[[Tensor], Any]


def compile_stack(stack: Stack, evaluated: bool) -> None:
    """Replace what ``stack`` differentiates, and evaluates where ``evaluated``, by compiled functions.

    Raises :class:`InputError` where that cannot be done or gives other numbers; the stack is then as it was.
    """
    near = NEAR[stack.tasks[0].precision]
    try:
        with _as_it_was(stack):
            train = _compiled(stack, stack.gradients, near)
            infer = _compiled(stack, _without_gradients(stack.logits), near) if evaluated else stack.infer
    except (InputError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise InputError(f"{type(error).__name__}: {_first_line(error)}") from error
    stack.differentiate, stack.infer = train, infer


def _compiled(stack: Stack, function: Function, near: float) -> Function:
    flat = stack.state.flat
    with _as_it_was(stack):
        expected = function(flat)  # also builds what is built once: forms of the adjacency, work lists
    with _as_it_was(stack):
        traced = _traced(function, flat)
    if any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in traced.graph.nodes):
        raise InputError("it draws from torch's generator, and compiled would draw other numbers")
    traced = fold_constants(traced, changing=stack.state.tensors().values())
    found = _by_inductor(traced, flat)
    with _as_it_was(stack):
        given = found(flat)
    _compare(given, expected, near)
    return found


def _traced(function: Function, flat: Tensor) -> GraphModule:
    """Every operator that ``function(flat)`` runs; tensors in fixed places are attributes."""
    return make_fx(lambda weights: function(weights), tracing_mode="real")(flat)


def _by_inductor(traced: GraphModule, flat: Tensor) -> Function:
    from torch import _inductor  # takes a second to import, and most runs do without

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = _inductor.compile(traced, [flat], options=dict(OPTIONS))
        call(flat)  # compiles
    several = len(_outputs(traced)) > 1

    def function(weights: Tensor) -> Any:
        found = call(weights)
        return tuple(found) if several else found[0] if isinstance(found, (tuple, list)) else found

    return function


def _outputs(traced: GraphModule) -> Sequence[Any]:
    result = next(node for node in traced.graph.nodes if node.op == "output").args[0]
    return result if isinstance(result, (tuple, list)) else (result,)


def _without_gradients(function: Function) -> Function:
    def call(flat: Tensor) -> Any:
        with torch.no_grad():
            return function(flat)

    return call


def _compare(given: Any, expected: Any, near: float) -> None:
    """:class:`InputError` unless what was compiled gives what it was made from gives."""
    pairs = [(given, expected)] if isinstance(expected, Tensor) else list(zip(given, expected, strict=True))
    for mine, other in pairs:
        mine, other = mine.float(), other.float()
        finite = other.isfinite()
        scale = other[finite].abs().max().clamp(min=1e-6) if bool(finite.any()) else torch.ones(())
        apart = ((mine - other)[finite].abs() / scale).max() if bool(finite.any()) else torch.zeros(())
        if not bool((mine.isfinite() == finite).all()) or not float(apart) <= near:
            raise InputError(f"compiled, it gives other numbers (by {float(apart):.1e} of the largest)")


@contextmanager
def _as_it_was(stack: Stack) -> Iterator[None]:
    """The state of ``stack`` and torch's generators are put back."""
    before = generator_states(stack.device)
    try:
        with put_back(stack.state.tensors().values()):
            yield
    finally:
        restore_generators(before, stack.device)


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else "no reason given"
