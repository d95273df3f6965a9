"""Sweeps on a tiny graph that train in a moment, and the events they send."""

from __future__ import annotations

from tests.graphs_for_tests import small, tiny_graph
from weft.core.sweep import Sweep


def make_sweep(graph=None, **settings) -> Sweep:
    """A sweep over ``settings``, on ``graph`` or on the tiny one."""
    graph = tiny_graph() if graph is None else graph
    return Sweep(**{"graph": graph, "epochs": 12, "name": "s", **small(settings.get("model", "gcn")), **settings})


def of_kind(events, kind: str) -> list:
    """The events of one kind."""
    return [event for event in events if event.kind == kind]
