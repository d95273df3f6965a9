"""Scores between the workers that train groups of one sweep that is pruned.

As in ``weft.run``, where groups follow each other, a group is compared with those before it: groups of the sweep, on
the same graph, whose first member is earlier in the sweep.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from weft.serve.state import ActiveGroup, SupervisorState

UNKNOWN: Mapping[str, Any] = {"peers": "", "bests": []}


def first_message(state: SupervisorState, active: ActiveGroup) -> dict[str, Any]:
    """What a worker gets with a group of a sweep that is pruned: how the members before it stand."""
    if active.contest is None:
        return {}
    prune, sweep, graph = active.contest
    rows = state.db.scores_of(sweep, graph)
    first = {row["batch"]: row["position"] for row in reversed(rows)}
    before = [row for row in rows if first[row["batch"]] < active.first]
    rivals = {row["id"]: {**json.loads(row["scores"]), "running": False} for row in before}
    for other in state.active.values():
        if other.contest == active.contest and other.first < active.first:
            rivals |= standing(other, other.members)
    return {"prune": prune, "rivals": rivals}


def standing(active: ActiveGroup, names: Sequence[str], running: bool = True) -> dict[str, Any]:
    """How members of a group that runs, or has just ended, stand."""
    return {name: {**active.scores.get(name, UNKNOWN), "running": running} for name in names}


def tell_later_groups(state: SupervisorState, active: ActiveGroup, members: Mapping[str, Any]) -> None:
    """Send how ``members`` of a group stand to the groups that come after it in the sweep."""
    for other in state.active.values():
        if active.contest is not None and other.contest == active.contest and other.first > active.first:
            other.worker.send("rivals", group=other.group.id, members=members)


def take_scores(state: SupervisorState, active: ActiveGroup, scores: Mapping[str, Mapping[str, Any]]) -> None:
    """Keep the scores that a worker sent of its group, and pass on those that are new."""
    begun = [(name, scores[name]) for name in active.members if name in scores]
    new = {name: {"peers": str(known["peers"]), "bests": list(known["bests"])} for name, known in begun}
    if new != active.scores:
        active.scores = new
        tell_later_groups(state, active, standing(active, active.members))


def group_ended(state: SupervisorState, active: ActiveGroup, outcomes: Mapping[str, Mapping[str, Any]]) -> None:
    """Let the groups after one that has left its worker wait for it no more; scores of ended members count."""
    active.scores = {name: one["scores"] for name, one in outcomes.items() if one.get("scores")}
    active.scores = {n: s for n, s in active.scores.items() if outcomes[n]["status"] not in ("preempted", "cancelled")}
    tell_later_groups(state, active, standing(active, active.members, running=False))
