"""WovenStep: the training steps of several stacks merged into one, whose operators share launches.

Each stack's step is traced while it runs once (and its state restored); the traces are merged by
:func:`weft.weave.merge.weave`. Evaluation and book-keeping stay per stack, concurrent on a GPU.

Shapes: T members of a stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.capture.observer import Observer
from weft.core.errors import InputError
from weft.core.plan import FILLS_DEVICE
from weft.ops.launch.backend import on_gpu
from weft.runtime.device.cuda_graph import gc_disabled
from weft.runtime.device.streams import SIDE_STREAMS, ConcurrentSteps, Steps, in_turn
from weft.runtime.dry_run import dry_run_concurrent
from weft.runtime.step.stack import Stack
from weft.weave.launchers import register
from weft.weave.merge import OWN_STREAM, Table, Woven, weave
from weft.weave.recorder import Captured, Graph, Node, map_nodes, put_back, record
from weft.weave.stream_schedule import Streamed, run_node, schedule

TOLERANCE = 1e-2  # of losses, wide enough for half precision


class WovenStep:
    """One epoch of ``stacks``, in place, as one merged step; ``table`` lists the members of each launch.

    Raises :class:`weft.core.errors.InputError` for stacks whose steps cannot be traced. ``structures`` as in
    :func:`weft.weave.merge.weave`. ``side_streams``: how many streams members' own work is spread over on a GPU, 0
    for the caller's alone; None decides by the size of the graph, since streams also keep memory from each other.
    """

    def __init__(self, stacks: Sequence[Stack], structures: str = "best", side_streams: int | None = None) -> None:
        self.stacks = tuple(stacks)
        if side_streams is None:
            side_streams = SIDE_STREAMS if _is_small(stacks) else 0
        self.side_streams = side_streams
        self._apart = self._losses(lambda: [_train(stack) for stack in stacks])
        self.woven: Woven = merged(stacks, structures)
        self._device = stacks[0].device
        self._run: Callable[[], tuple[Any, ...]] = self.woven
        self.beside: Callable[[Steps], None] = in_turn
        if side_streams > 0 and self._device.type == "cuda":
            self._run = Streamed(self.woven, side_streams, self._device)
            self.beside = ConcurrentSteps(self._device)

    @property
    def table(self) -> Table:
        """Which fused kernel serves which members."""
        return self.woven.table

    def check(self) -> None:
        """Train one epoch from the stacks' initial state, and restore their states.

        Raises :class:`InputError` if the losses differ from those of the stacks' own steps: kernels generated for a
        group are used only if they reproduce those. Meta tensors have nothing to compare.
        """
        if self._device.type == "meta":
            return
        woven, apart = self._losses(self.train), self._apart
        if not torch.allclose(woven, apart, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
            worst = int((woven - apart).abs().nan_to_num(nan=torch.inf).argmax())
            raise InputError(f"a loss of the merged step is {woven[worst]:g} where it should be {apart[worst]:g}")

    def _losses(self, train: Callable[[], Sequence[Tensor]]) -> Tensor:
        """Losses of all members by one way to train an epoch, ``[sum of T]``; the stacks are as they were."""
        with put_back(tensor for stack in self.stacks for tensor in stack.state.tensors().values()):
            return torch.cat([loss.detach().float().clone() for loss in train()])

    def train(self) -> tuple[Tensor, ...]:
        """Forward, loss, backward and update of every stack; their losses ``[T]``."""
        return self._run()

    def __call__(self) -> None:
        """Train one epoch, evaluate the new weights and record the outcome."""
        self._each(Stack.evaluate, self.train())

    def without_evaluation(self) -> None:
        """Train one epoch and record only its training losses."""
        self._each(Stack.note, self.train())

    def _each(self, finish: Callable[[Stack, Tensor], None], losses: tuple[Tensor, ...]) -> None:
        """Run what follows the step of every stack, on the side streams if there are any."""
        self.beside([partial(finish, stack, loss) for stack, loss in zip(self.stacks, losses, strict=True)])


def merged(stacks: Sequence[Stack], structures: str = "best") -> Woven:
    """The steps of ``stacks``, which have run before, traced and merged into one; the stacks are restored."""
    small = _is_small(stacks) and on_gpu(stacks[0].state.flat)  # a CPU launches nothing
    with gc_disabled():
        return weave([_recorded(stack, small) for stack in stacks], structures, small=small)


def _train(stack: Stack) -> Tensor:
    return stack.train_step(stack.source.example())


def _is_small(stacks: Sequence[Stack]) -> bool:
    return stacks[0].graph.num_edges < FILLS_DEVICE


def _recorded(stack: Stack, apart: bool) -> Captured:
    """The trace of a stack's step."""
    names = [task.label for task in stack.tasks]
    name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    return record(lambda: _train(stack), name, stack.state.tensors().values(), apart=apart, has_run=True)


# ---- Dry-run a merged step: report the phase and the stream of every operator to an Observer.
#
# A merged step runs without autograd: gradients are operators like any other, and its nodes carry their phase. On a
# GPU
# they are issued to several streams, which do not share memory; a dry run has no streams, but the schedule says on
# which
# one each operator would run, and when its result would be released.


class Followed:
    """``followed()`` runs one step of every member; ``streams``: as on a GPU, or else one after the other."""

    def __init__(self, woven: Woven, observer: Observer, streams: bool) -> None:
        self._woven, self._observer = woven, observer
        if streams:
            self._actions = [(a.node, a.stream, a.drops) for a in schedule(woven, SIDE_STREAMS).actions]
        else:
            self._actions = list(_in_order(woven.graph))

    def __call__(self) -> Any:
        """Run the step; what follows it is evaluation."""
        graph, observer = self._woven.graph, self._observer
        given = [node for node in graph.nodes if node.op == "placeholder"]
        values: dict[Node, Any] = dict(zip(given, self._woven.inputs, strict=True))
        for node, stream, drops in self._actions:
            observer.phase, observer.stream = "backward" if node.meta.get("backward") else "forward", stream
            run_node(node, values)
            for done in drops:
                del values[done]
        observer.phase, observer.stream = "evaluation", OWN_STREAM
        return map_nodes(_output(graph), lambda node: values[node])


def dry_run_woven(step: WovenStep, observer: Observer, streams: bool) -> None:
    """Report the merged step to ``observer``, from its next call on."""
    streams = streams and step.side_streams > 0
    followed = Followed(step.woven, observer, streams)
    step._run = followed
    if streams:
        step.beside = dry_run_concurrent(observer)


def _output(graph: Graph) -> Any:
    return next(node for node in graph.nodes if node.op == "output").args[0]


def _in_order(graph: Graph) -> Iterator[tuple[Node, int, list[Node]]]:
    """Every operator with the results that are dead after it."""
    last: dict[Node, Node] = {}
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    for node in nodes:
        last[node] = node
        for used in node.all_input_nodes:
            last[used] = node
    kept: set[Node] = set()
    map_nodes(_output(graph), kept.add)
    drops: dict[Node, list[Node]] = {}
    for used, by in last.items():
        if used.op == "call_function" and used not in kept:
            drops.setdefault(by, []).append(used)
    yield from ((node, OWN_STREAM, drops.get(node, [])) for node in nodes)


# ---- Weaver: merges the steps of a group's stacks, behind the runtime's StepMerger interface.


class Weaver:
    """Makes merged steps, and reports them to a dry run. See :class:`weft.runtime.epoch.StepMerger`."""

    def merge(self, stacks: Sequence[Stack]) -> WovenStep:
        """The checked merged step of ``stacks``; raises InputError if they cannot be merged."""
        step = WovenStep(stacks)
        step.check()
        return step

    def observe(self, step: WovenStep, observer: Observer, streams: bool) -> None:
        """Report the operators of ``step`` to ``observer`` from its next call on."""
        register()
        dry_run_woven(step, observer, streams)
