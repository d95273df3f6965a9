"""WovenStep: the training steps of several stacks merged into one, whose operators share launches.

Each stack's step is traced while it runs once (and its state restored); the traces are merged by
:func:`weft.weave.merge.weave`. Evaluation and book-keeping stay per stack, concurrent on a GPU. :class:`Weaver` offers
merged steps to the runtime.

Shapes: T members of a stack.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.capture.observer import Observer
from weft.core.errors import InputError
from weft.core.plan import FILLS_DEVICE
from weft.core.startup import no_collections
from weft.ops.launch.backend import on_gpu
from weft.runtime.device.cuda_graph import SIDE_STREAMS, ConcurrentSteps, Steps, streams_of
from weft.runtime.dry_run import dry_run_concurrent
from weft.runtime.step.stack import Stack
from weft.weave.launchers import register
from weft.weave.merge import OWN_STREAM, Woven, weave
from weft.weave.recorder import StepNode, map_nodes, record, restored

TOLERANCE = 1e-2  # of losses, wide enough for half precision


class WovenStep:
    """One epoch of ``stacks``, in place, as one merged step.

    Raises :class:`weft.core.errors.InputError` for stacks whose steps cannot be traced. ``push`` as in
    :func:`weft.weave.merge.weave`. ``side_streams``: how many streams members' own work is spread over on a GPU, 0
    for the caller's alone; None decides by the size of the graph, since streams also keep memory from each other.
    """

    def __init__(self, stacks: Sequence[Stack], side_streams: int | None = None, push: bool = False) -> None:
        self.stacks = tuple(stacks)
        if side_streams is None:
            side_streams = SIDE_STREAMS if _is_small(stacks) else 0
        self.side_streams = side_streams
        self._separate_losses = self._losses(lambda: [_train(stack) for stack in stacks])
        self.woven: Woven = merged(stacks, push)
        self._device = stacks[0].device
        self._run: Callable[[], tuple[Any, ...]] = self.woven
        self._concurrently: Callable[[Steps], None] | None = None  # None: in turn
        if side_streams > 0 and self._device.type == "cuda":
            self._run = Streamed(self.woven, side_streams, self._device)
            self._concurrently = ConcurrentSteps(self._device)

    def check(self) -> None:
        """Train one epoch from the stacks' initial state, and restore their states.

        Raises :class:`InputError` if the losses differ from those of the stacks' own steps: kernels generated for a
        group are used only if they reproduce those. Meta tensors have nothing to compare.
        """
        if self._device.type == "meta":
            return
        woven, separate = self._losses(self.train), self._separate_losses
        if not torch.allclose(woven, separate, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
            worst = int((woven - separate).abs().nan_to_num(nan=torch.inf).argmax())
            raise InputError(f"a loss of the merged step is {woven[worst]:g} where it should be {separate[worst]:g}")

    def _losses(self, train: Callable[[], Sequence[Tensor]]) -> Tensor:
        """Losses of all members by one way to train an epoch, ``[sum of T]``; the stacks are restored."""
        with restored(tensor for stack in self.stacks for tensor in stack.state.tensors().values()):
            return torch.cat([loss.detach().float().clone() for loss in train()])

    def train(self) -> tuple[Tensor, ...]:
        """Forward, loss, backward and update of every stack; their losses ``[T]``."""
        return self._run()

    def __call__(self, evaluated: bool = True) -> None:
        """Train one epoch and record the outcome, on the side streams if there are any.

        Without an evaluation only the training losses are recorded.
        """
        pairs = zip(self.stacks, self.train(), strict=True)
        records = [partial(stack.record, losses, evaluated) for stack, losses in pairs]
        if self._concurrently is not None:
            self._concurrently(records)
        else:
            for record_stack in records:
                record_stack()

    def observe(self, observer: Observer, streams: bool) -> None:
        """Report the phase and the stream of every operator to ``observer``, from the next call on.

        A merged step runs without autograd: gradients are operators like any other, and its nodes carry their phase.
        With ``streams`` they are reported as issued to several streams, which do not share memory: a dry run has no
        streams, but the schedule says on which one each operator would run, and when its result would be released.
        """
        on_streams = streams and self.side_streams > 0
        if on_streams:
            self._concurrently = dry_run_concurrent(observer)
        actions = schedule(self.woven, SIDE_STREAMS if on_streams else 0).actions

        def run() -> tuple[Any, ...]:
            values = self.woven.initial_values()
            for action in actions:
                observer.phase = "backward" if action.node.meta.get("backward") else "forward"
                observer.stream = action.stream
                run_node(action.node, values)
                for dead in action.drops:
                    del values[dead]
            observer.phase, observer.stream = "evaluation", OWN_STREAM
            return self.woven.returned(values)

        self._run = run


def merged(stacks: Sequence[Stack], push: bool = False) -> Woven:
    """The steps of ``stacks``, which have run before, traced and merged into one; the stacks are restored."""
    # A CPU launches nothing. With dense operators in the rounds, backward sums of one member hardly meet forward ones.
    small = _is_small(stacks) and on_gpu(stacks[0].state.flat) and not push
    captured = []
    with no_collections():
        for stack in stacks:
            labels = [task.label for task in stack.tasks]
            name = labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more"
            changed = stack.state.tensors().values()
            captured.append(record(partial(_train, stack), name, changed, split=small, has_run=True))
        # A backward sum is pushed where it meets forward ones, which are over another structure.
        return weave(captured, ("any",) if push else ("same", "any"), push, small)


def _train(stack: Stack) -> Tensor:
    return stack.train_step(stack.source.example())


def _is_small(stacks: Sequence[Stack]) -> bool:
    return stacks[0].graph.num_edges < FILLS_DEVICE


class Weaver:
    """Makes merged steps for :class:`weft.runtime.group.GroupRun`, and reports them to a dry run.

    ``push`` selects TurboMGNN's pull-and-push: see :func:`weft.weave.merge.weave`.
    """

    def __init__(self, push: bool = False) -> None:
        self._push = push

    def merge(self, stacks: Sequence[Stack]) -> WovenStep:
        """The checked merged step of ``stacks``; raises InputError if they cannot be merged."""
        step = WovenStep(stacks, push=self._push)
        step.check()
        return step

    def observe(self, step: WovenStep, observer: Observer, streams: bool) -> None:
        """Report the operators of ``step`` to ``observer`` from its next call on."""
        register()
        step.observe(observer, streams)


# ---- Schedule a woven step on several streams: which events to wait for, and when memory may be released.
#
# Fused nodes run on the caller's stream, a member's own nodes on one of a few side streams, so that members' dense work
# overlaps. If a node needs a result of another stream, it waits for an event recorded there. During the capture of a
# CUDA graph, events become edges of the graph.
#
# The allocator reuses a freed block on the stream it came from, without regard to other streams. So a tensor that
# another stream reads is kept until its own stream has waited for that read. The schedule is computed once, before the
# first run.


START = -1  # the event of the beginning, on the caller's stream


@dataclass
class Action:
    """One node: the stream it runs on, the actions it waits for (START or numbers), whether any action waits for it,
    and the nodes whose results are dead after it."""

    node: StepNode
    stream: int
    waits: list[int] = field(default_factory=list)
    event: bool = False
    drops: list[StepNode] = field(default_factory=list)


@dataclass(frozen=True)
class Schedule:
    """The actions in the order in which they are issued; the caller's stream waits for ``joins`` at the end."""

    actions: tuple[Action, ...]
    joins: tuple[int, ...]


def schedule(woven: Woven, side_streams: int) -> Schedule:
    """Work out streams, waits and lifetimes of a woven step; members share ``side_streams`` streams (0: none)."""
    nodes = woven.graph.calls
    streams = []
    for node in nodes:
        stream = node.meta["stream"]
        is_own = stream == OWN_STREAM or not side_streams
        streams.append(OWN_STREAM if is_own else 1 + (stream - 1) % side_streams)
    actions = [Action(node, stream) for node, stream in zip(nodes, streams, strict=True)]
    number_of = {node: number for number, node in enumerate(nodes)}
    clocks = _Clocks()
    lifetimes = _Lifetimes(woven, nodes, streams)
    for number, action in enumerate(actions):
        sources = (*action.node.meta["after"], *action.node.all_input_nodes)
        before = [number_of[source] for source in sources if source in number_of]
        action.waits = clocks.meet(number, action.stream, [(other, streams[other]) for other in before])
        for other in action.waits:
            if other != START:
                actions[other].event = True
        action.drops = lifetimes.after(number, action, clocks)
    joins = {stream: number for number, stream in enumerate(streams) if stream != OWN_STREAM}
    for number in joins.values():
        actions[number].event = True
    return Schedule(tuple(actions), tuple(joins.values()))


class _Clocks:
    """For every stream, the last action of every other stream that its own work comes after."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[int, int]] = {}
        self._at: list[dict[int, int]] = []  # what an action's stream had seen when it was issued

    def meet(self, number: int, stream: int, before: Sequence[tuple[int, int]]) -> list[int]:
        """Action ``number`` on ``stream`` comes after actions (number, stream): the events it must wait for."""
        waits = []
        if stream not in self.seen:
            self.seen[stream] = {}
            waits += [START] if stream != OWN_STREAM else []
        mine = self.seen[stream]
        for other, theirs in sorted(before, reverse=True):
            if theirs != stream and mine.get(theirs, START) < other:
                waits.append(other)
                mine[theirs] = other
                for third, upto in self._at[other].items():
                    mine[third] = max(mine.get(third, START), upto)
        self._at.append(dict(mine))
        return waits


class _Lifetimes:
    """When the result of each node may be dropped."""

    def __init__(self, woven: Woven, nodes: Sequence[StepNode], streams: Sequence[int]) -> None:
        number_of = {node: number for number, node in enumerate(nodes)}
        returned = set(woven.graph.returns.all_input_nodes)
        home: dict[Any, int] = {}  # the stream that a storage was allocated on
        self._home: dict[StepNode, int] = {}
        self._readers: dict[StepNode, dict[int, int]] = {}
        self._due: dict[int, list[StepNode]] = defaultdict(list)
        self._held: dict[int, list[StepNode]] = defaultdict(list)  # by the stream that has not waited for it yet
        for number, node in enumerate(nodes):
            storage = node.meta.get("storage", node)
            self._home[node] = home.setdefault(storage, streams[number])
            users = sorted(number_of[user] for user in node.users if user in number_of)
            self._readers[node] = {streams[number]: number} | {streams[user]: user for user in users}
            if node not in returned:
                self._due[max([number, *users])].append(node)

    def after(self, number: int, action: Action, clocks: _Clocks) -> list[StepNode]:
        """The nodes to be dropped after an action: read for the last time, and their own stream knows it.

        A stream learns of others when it waits; nodes held for it are checked again then.
        """
        candidates = [*(self._held.pop(action.stream, ()) if action.waits else ()), *self._due.pop(number, ())]
        free = []
        for node in candidates:
            home, readers = self._home[node], self._readers[node]
            seen = clocks.seen.get(home, {})
            settled = all(stream == home or seen.get(stream, START) >= last for stream, last in readers.items())
            (free if settled else self._held[home]).append(node)
        return free


class Streamed:
    """A woven step issued to streams of the CUDA device ``device``, to be captured as one CUDA graph."""

    def __init__(self, woven: Woven, side_streams: int, device: torch.device) -> None:
        self._woven, self._device = woven, device
        self._schedule = schedule(woven, side_streams)
        self._side = dict(enumerate(streams_of(device).side[:side_streams], 1))

    def __call__(self) -> tuple[Any, ...]:
        """One step of every member; the caller's stream comes after all of it."""
        own = torch.cuda.current_stream(self._device)
        streams = {OWN_STREAM: own, **self._side}
        values: dict[StepNode, Any] = self._woven.initial_values()
        events: dict[int, torch.cuda.Event] = {START: own.record_event()}
        for number, action in enumerate(self._schedule.actions):
            stream = streams[action.stream]
            for other in action.waits:
                stream.wait_event(events[other])
            with torch.cuda.stream(stream):
                run_node(action.node, values)
            if action.event:
                events[number] = stream.record_event()
            for node in action.drops:
                del values[node]
        for number in self._schedule.joins:
            own.wait_event(events[number])
        return self._woven.returned(values)


def run_node(node: StepNode, values: dict[StepNode, Any]) -> None:
    """Run one node on the results so far."""
    args, kwargs = map_nodes((node.args, node.kwargs), values.__getitem__)
    values[node] = node.target(*args, **kwargs)
