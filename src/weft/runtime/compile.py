"""compile_stack: compile a stack's forward, loss and backward with Inductor, which fuses between Weft's operators.

Built-in layers leave little to fuse. A user's module may be full of element-wise passes and reductions, PyG's layers of
gathers and scatters: an epoch of PyG's GCN on the arxiv shape took 20.2 ms on an H200, and 2.78 compiled. The predicted
gain is in :mod:`weft.planner.cost.inductor`.

The stack's own functions are traced below autograd and vmap, with every tensor that they read in its fixed place, and
Weft's operators stay opaque calls. The result takes only the weights, and can be captured as a CUDA graph like the
original. It is used only if it reproduces the losses and gradients.

Shapes: T members, P parameters, N nodes, C classes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from weft.capture.observer import HOST_READS, written_places
from weft.core.errors import InputError
from weft.runtime.device.process import same_draws
from weft.runtime.modules.state import memory_of
from weft.runtime.step.preflight import apart
from weft.runtime.step.stack import Stack
from weft.runtime.step.state import restored

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
    varying = _varying(traced, {memory_of(tensor) for tensor in changing})
    nodes = list(traced.graph.nodes)
    constant = {node for node in nodes if node not in varying and node.op == "call_function"}
    last_reader = {arg: node for node in nodes for arg in node.all_input_nodes if node in constant}
    values: dict[Node, Any] = {}
    folded: list[tuple[Node, Tensor]] = []

    def value_of(node: Node) -> Any:
        return getattr(traced, str(node.target)) if node.op == "get_attr" else values[node]

    with torch.no_grad():
        for node in (node for node in nodes if node in constant):
            args, kwargs = map_arg((node.args, node.kwargs), value_of)
            values[node] = node.target(*args, **kwargs)
            if isinstance(values[node], Tensor) and any(user not in constant for user in node.users):
                folded.append((node, values[node]))
            for arg in node.all_input_nodes:
                if last_reader.get(arg) is node:
                    values.pop(arg, None)
    for number, (node, value) in enumerate(folded):
        name = f"{NAME}{number}"
        traced.register_buffer(name, value)
        with traced.graph.inserting_before(node):
            node.replace_all_uses_with(traced.graph.get_attr(name))
    for node in reversed(list(traced.graph.nodes)):
        if node in constant and not node.users:
            traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code(lambda node: node.op not in ("get_attr",))
    traced.recompile()
    return traced


def _varying(traced: GraphModule, changing: set[int]) -> set[Node]:
    """The nodes whose value may differ from call to call."""
    nodes, root, varying = list(traced.graph.nodes), _roots(traced), set()
    for node in nodes:
        if node.op == "get_attr":
            value = getattr(traced, str(node.target), None)
            varies = not isinstance(value, Tensor) or memory_of(value) in changing
        else:
            seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            varies = node.op != "call_function" or seeded
        if varies:
            varying.add(node)
    memory = {root[node] for node in varying}  # by the node that owns it: what is in it varies
    while True:
        for node in nodes:
            if node not in varying and (root[node] in memory or any(arg in varying for arg in node.all_input_nodes)):
                varying.add(node)
        # Memory that a varying node writes to, or that is written to after a varying node has read it, varies too. So
        # does a tensor that existed before a call and is written in it: it has another value in the next one.
        grown, read = set(memory), set()
        for node in nodes:
            for written in _written(node):
                if node in varying or root[written] in read or root[written].op == "get_attr":
                    grown.add(root[written])
            if node in varying:
                read.update(root[arg] for arg in node.all_input_nodes)
        if grown == memory:
            return varying
        memory = grown


def _roots(traced: GraphModule) -> dict[Node, Node]:
    """For every node the first one that owns its memory: views and in-place results share it."""
    root: dict[Node, Node] = {}
    by_memory: dict[Any, Node] = {}
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            value = getattr(traced, str(node.target), None)
            root[node] = by_memory.setdefault(memory_of(value) if isinstance(value, Tensor) else node.target, node)
            continue
        aliased: list[Node] = []  # inputs that the result may share memory with
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and (schema is None or schema.name.rpartition("::")[2] in SHARES):
            aliased = list(node.all_input_nodes[:1])  # without a schema: picking one of several results
        elif node.op == "call_function":
            named = {argument.name for argument in schema.arguments if argument.alias_info is not None}
            pairs = zip(schema.arguments, node.args, strict=False)
            values = [value for argument, value in pairs if argument.name in named]
            aliased = _nodes_in([*values, *(value for name, value in node.kwargs.items() if name in named)])
        root[node] = root[aliased[0]] if aliased else node
    return root


def _written(node: Node) -> list[Node]:
    """The inputs that a node writes to."""
    if node.op != "call_function":
        return []
    return _nodes_in(
        node.args[at] if at < len(node.args) else node.kwargs.get(n) for at, n in written_places(node.target)
    )


def _nodes_in(values: Iterable[Any]) -> list[Node]:
    nodes: list[Node] = []
    map_arg(tuple(values), nodes.append)
    return nodes


# ---- Numbers that a module reads back to the host: a trace would make constants of them.

READ_WHOLE = (Tensor.tolist, Tensor.numpy, Tensor.__array__)


class HostReads(TorchDispatchMode):
    """Inside, ``tensors`` collects those from which a number is read back to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in HOST_READS:
            self.tensors += [value for value in args if isinstance(value, Tensor)]
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
READS_BACK = "get value out of a tracing tensor"  # torch's words

Function = Callable[[Tensor], Any]


def compile_stack(stack: Stack, evaluated: bool) -> None:
    """Replace what ``stack`` differentiates, and evaluates if ``evaluated``, by compiled functions.

    Raises :class:`InputError` if that fails or gives other numbers; the stack is then unchanged.
    """
    try:
        with _restored(stack):
            if not stack.source.constant:
                raise InputError(
                    "its batches differ from step to step, and a compiled step has its tensors in fixed places"
                )
            if stack.members.findings.hidden_state is not None:
                raise InputError(stack.members.findings.hidden_state)
            if stack.members.findings.writes:
                raise InputError("it changes its own weights")
            if stack.members.layout.other_kinds or stack.members.findings.sparse:
                raise InputError("some of its parameters are not float32, or have sparse gradients")
            if not stack.members.plain_output:
                raise InputError("it returns more than logits")
            batch = stack.source.example()

            def logits(flat: Tensor) -> Tensor:
                with torch.no_grad():
                    return stack.logits(flat, batch)

            # Functions of weights become functions of weights and a batch: always the one they were compiled for.
            train = _compiled(stack, partial(stack.gradients, batch=batch))
            infer = _compiled(stack, logits) if evaluated else None
    except (InputError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no reason given"]
        reads = READS_BACK in str(error)
        what = "it reads numbers back from its data" if reads else f"{type(error).__name__}: {lines[0]}"
        raise InputError(what) from error
    stack.compiled = lambda flat, batch: train(flat), stack.infer if infer is None else lambda flat, batch: infer(flat)


def _compiled(stack: Stack, function: Function) -> Function:
    """``function`` of the weights, compiled; :class:`InputError` unless it reproduces the original."""
    flat = stack.state.flat
    with _restored(stack), HostReads() as host_reads:
        expected = function(flat)  # also builds the forms of the adjacency and work lists
    with _restored(stack), ForbidHostReads(), stack.as_function():
        # Every operator that it runs; tensors in fixed places are attributes.
        traced = make_fx(lambda weights: function(weights), tracing_mode="real")(flat)
    root = _roots(traced)
    owners = {root[written] for node in traced.graph.nodes for written in _written(node)}
    written = [getattr(traced, str(node.target), None) for node in owners if node.op == "get_attr"]
    changing = [*stack.state.tensors().values(), *(value for value in written if isinstance(value, Tensor))]
    if {memory_of(tensor) for tensor in changing} & {memory_of(tensor) for tensor in host_reads.tensors}:
        raise InputError("it branches on numbers that change in training, and a compiled step would branch once")
    if any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in traced.graph.nodes):
        raise InputError("it draws from torch's generator, and a compiled step would draw other numbers")
    traced = fold_constants(traced, changing=stack.state.tensors().values())
    compiled = _by_inductor(traced, flat)
    with _restored(stack):
        result = compiled(flat)
    if isinstance(expected, Tensor):
        differences = [apart(mine, true) for mine, true in zip(result, expected, strict=True)]
    else:  # per member and parameter
        (losses, grads), (true_losses, true_grads) = result, expected
        differences, layout = [apart(losses, true_losses)], stack.members.layout
        for mine, true in zip(grads, true_grads, strict=True):
            parts = zip(layout.views(mine), layout.views(true), strict=True)
            differences += [apart(part, true_part, true) for part, true_part in parts]
    worst = max(differences)
    if not worst <= NEAR[stack.tasks[0].precision]:
        raise InputError(f"compiled, it gives other numbers (by {worst:.1e} of the largest)")
    return compiled


def _by_inductor(traced: GraphModule, flat: Tensor) -> Function:
    from torch import _inductor  # takes a second to import, and most runs do not need it
    from torch._inductor import config

    available = config.get_config_copy()  # of this version of torch
    options = {name: value for name, value in OPTIONS.items() if name in available}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = _inductor.compile(traced, [flat], options=options)
        call(flat)  # compiles
    returned = next(node for node in traced.graph.nodes if node.op == "output").args[0]
    several = isinstance(returned, (tuple, list)) and len(returned) > 1

    def function(weights: Tensor) -> Any:
        result = call(weights)
        return tuple(result) if several else result[0] if isinstance(result, (tuple, list)) else result

    return function


@contextmanager
def _restored(stack: Stack) -> Iterator[None]:
    """Restore the state of ``stack`` and torch's generators at the end."""
    with same_draws(stack.device), restored(stack.state.tensors().values()):
        yield
