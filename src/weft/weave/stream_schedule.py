"""Schedule a woven step on several streams: which events to wait for, and when memory may be released.

Fused nodes run on the caller's stream, a member's own nodes on one of a few side streams, so that members' dense work
overlaps. If a node needs a result of another stream, it waits for an event recorded there. During the capture of a CUDA
graph, events become edges of the graph.

The allocator reuses a freed block on the stream it came from, without regard to other streams. So a tensor that another
stream reads is kept until its own stream has waited for that read. The schedule is computed once, before the first run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.runtime.device.cuda_graph import streams_of
from weft.weave.merge import OWN_STREAM, Woven
from weft.weave.recorder import StepNode, map_nodes

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
        assert woven.graph.returns is not None
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
