"""Dry-run a merged step: report the phase and the stream of every operator to an Observer.

A merged step runs without autograd: gradients are operators like any other, and its nodes carry their phase. On a GPU
they are issued to several streams, which do not share memory; a dry run has no streams, but the schedule says on which
one each operator would run, and when its result would be released.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.capture.observer import Observer
from weft.runtime.device.streams import SIDE_STREAMS
from weft.runtime.dry_run import dry_run_concurrent
from weft.weave.graph import Graph, Node, map_nodes
from weft.weave.step import WovenStep
from weft.weave.stream_schedule import run_node, schedule
from weft.weave.woven import OWN_STREAM, Woven


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
