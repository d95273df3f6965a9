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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from weft.batches.source import Batch
from weft.capture.observer import HOST_READS, written_places
from weft.core.errors import InputError
from weft.runtime.device.process import generator_states, restore_generators
from weft.runtime.step.parameters import Layout
from weft.runtime.step.stack import Stack
from weft.runtime.step.state import put_back

# ---- fold_constants: compute once what a traced step computes from the graph alone.
#
# A layer that takes edges as data may normalise them, add loops or select some of them in every call, with the same
# result every time. Folding it leaves a step with static shapes, which can be compiled and captured as a CUDA graph. A
# tensor that existed before the step and that it writes to, such as a counter, differs from call to call.

NAME = "_folded"
SHARES = ("_unsafe_view", "_reshape_alias")  # outputs alias an input, though their schemas do not say so


def fold_constants(traced: GraphModule, changing: Iterable[Tensor]) -> GraphModule:
    """``traced`` with everything folded that depends on neither its inputs nor the tensors ``changing``.

    Folded results that are read become attributes; the module is changed and returned.
    """
    varying = _varying(traced, {place_of(tensor) for tensor in changing})
    kept = {node for node in traced.graph.nodes if node not in varying and node.op == "call_function"}
    for number, (node, value) in enumerate(_worked_out(traced, kept)):
        name = f"{NAME}{number}"
        traced.register_buffer(name, value)
        with traced.graph.inserting_before(node):
            node.replace_all_uses_with(traced.graph.get_attr(name))
    for node in reversed(list(traced.graph.nodes)):
        if node in kept and not node.users:
            traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code(lambda node: node.op not in ("get_attr",))
    traced.recompile()
    return traced


def _varying(traced: GraphModule, changing: set[int]) -> set[Node]:
    """The nodes whose value may differ from call to call."""
    nodes = list(traced.graph.nodes)
    root = _roots(traced)
    varying = {node for node in nodes if _varies_by_itself(traced, node, changing)}
    places = {root[node] for node in varying}
    while True:
        for node in nodes:
            if node not in varying and (root[node] in places or any(arg in varying for arg in node.all_input_nodes)):
                varying.add(node)
        grown = places | _written_late(nodes, root, varying)
        if grown == places:
            return varying
        places = grown


def _varies_by_itself(traced: GraphModule, node: Node, changing: set[int]) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "get_attr":
        value = getattr(traced, str(node.target), None)
        return not isinstance(value, Tensor) or place_of(value) in changing
    tags = getattr(node.target, "tags", ())
    return node.op != "call_function" or torch.Tag.nondeterministic_seeded in tags


def _written_late(nodes: list[Node], root: dict[Node, Node], varying: set[Node]) -> set[Node]:
    """Places that a varying node writes to, or that are written to after a varying node has read them.

    A tensor that existed before a call and is written in it has another value in the next one.
    """
    found, read = set(), set()
    for node in nodes:
        for written in _written(node):
            if node in varying or root[written] in read or root[written].op == "get_attr":
                found.add(root[written])
        if node in varying:
            read.update(root[arg] for arg in node.all_input_nodes)
    return found


def _roots(traced: GraphModule) -> dict[Node, Node]:
    """For every node the first one that owns its memory: views and in-place results share it."""
    root: dict[Node, Node] = {}
    by_place: dict[Any, Node] = {}
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            value = getattr(traced, str(node.target), None)
            root[node] = by_place.setdefault(place_of(value) if isinstance(value, Tensor) else node.target, node)
        else:
            shared = next(iter(_shared(node)), None)
            root[node] = node if shared is None else root[shared]
    return root


def _shared(node: Node) -> list[Node]:
    """The inputs that a node's result may alias."""
    if node.op != "call_function":
        return []
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # picking one of several results
        return list(node.all_input_nodes[:1])
    if schema.name.rpartition("::")[2] in SHARES:
        return list(node.all_input_nodes[:1])
    named = {argument.name for argument in schema.arguments if argument.alias_info is not None}
    places = zip(schema.arguments, node.args, strict=False)
    given = [value for argument, value in places if argument.name in named]
    given += [value for name, value in node.kwargs.items() if name in named]
    return _nodes_in(given)


def _written(node: Node) -> list[Node]:
    if node.op != "call_function":
        return []
    return _nodes_in(
        node.args[at] if at < len(node.args) else node.kwargs.get(n) for at, n in written_places(node.target)
    )


def _nodes_in(values: Iterable[Any]) -> list[Node]:
    found: list[Node] = []
    map_arg(tuple(values), found.append)
    return found


def _worked_out(traced: GraphModule, kept: set[Node]) -> list[tuple[Node, Tensor]]:
    """The values of the ``kept`` nodes that others read."""
    last = {arg: node for node in traced.graph.nodes for arg in node.all_input_nodes if node in kept}
    values: dict[Node, Any] = {}
    found = []
    with torch.no_grad():
        for node in list(traced.graph.nodes):
            if node not in kept:
                continue
            args, kwargs = map_arg((node.args, node.kwargs), lambda arg: _value(traced, arg, values))
            values[node] = node.target(*args, **kwargs)
            if isinstance(values[node], Tensor) and any(user not in kept for user in node.users):
                found.append((node, values[node]))
            for arg in node.all_input_nodes:
                if last.get(arg) is node:
                    values.pop(arg, None)
    return found


def _value(traced: GraphModule, node: Node, values: dict[Node, Any]) -> Any:
    return getattr(traced, str(node.target)) if node.op == "get_attr" else values[node]


def attributes_written(traced: GraphModule) -> list[Tensor]:
    """The tensors that existed before ``traced`` ran and that it writes to."""
    root = _roots(traced)
    places = {root[written] for node in traced.graph.nodes for written in _written(node)}
    values = [getattr(traced, str(node.target), None) for node in places if node.op == "get_attr"]
    return [value for value in values if isinstance(value, Tensor)]


def place_of(tensor: Tensor) -> int:
    """A key equal for live tensors that share memory."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse, or left over from a transform that has ended
        return id(tensor)


# ---- Numbers that a module reads back to the host: a trace would make constants of them.

READ_WHOLE = (Tensor.tolist, Tensor.numpy, Tensor.__array__)


class HostReads(TorchDispatchMode):
    """Inside, ``asked`` collects the tensors from which a number is read back to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in HOST_READS:
            self.asked += [value for value in args if isinstance(value, Tensor)]
        return func(*args, **(kwargs or {}))


class ForbidHostReads(TorchFunctionMode):
    """Inside, ``tolist()`` and ``numpy()`` raise: they read data back without an operator that a trace could see."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READ_WHOLE:
            raise InputError("it reads numbers back from its data")
        return func(*args, **(kwargs or {}))


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
    with _as_it_was(stack), ForbidHostReads(), stack.as_function():
        traced = _traced(function, flat)
    changing = (*stack.state.tensors().values(), *attributes_written(traced))
    if {place_of(tensor) for tensor in changing} & {place_of(tensor) for tensor in questions.asked}:
        raise InputError("it branches on numbers that change in training, and a compiled step would branch once")
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
