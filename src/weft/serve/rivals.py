"""Exchange scores between the workers that train groups of one pruned sweep.

A group is compared with the groups before it, as in ``weft.run``, where groups run one after another: groups of the
sweep on the same graph whose first member is earlier in the sweep.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from weft.serve.state import ActiveGroup, SupervisorState

NO_SCORES: Mapping[str, Any] = {"peers": "", "bests": []}


def scores_before(state: SupervisorState, active: ActiveGroup) -> dict[str, Any]:
    """Return what a worker needs to prune a group: the policy, and the scores of earlier members; {} if not pruned."""
    if active.contest is None:
        return {}
    prune, sweep, graph = active.contest
    rows = state.db.scores_of(sweep, graph)
    first = {row["batch"]: row["position"] for row in reversed(rows)}
    before = [row for row in rows if first[row["batch"]] < active.first]
    rivals = {row["id"]: {**json.loads(row["scores"]), "running": False} for row in before}
    for other in state.active.values():
        if other.contest == active.contest and other.first < active.first:
            rivals |= scores_of(other, other.members)
    return {"prune": prune, "rivals": rivals}


def scores_of(active: ActiveGroup, names: Sequence[str], running: bool = True) -> dict[str, Any]:
    """Return the scores of members of a group that runs or has just ended, and whether they are ``running``."""
    return {name: {**active.scores.get(name, NO_SCORES), "running": running} for name in names}


def send_to_later_groups(state: SupervisorState, active: ActiveGroup, members: Mapping[str, Any]) -> None:
    """Send the scores of a group's ``members`` to the workers of the groups after it in the sweep."""
    for other in state.active.values():
        if active.contest is not None and other.contest == active.contest and other.first > active.first:
            other.worker.send("rivals", group=other.group.id, members=members)


def update_scores(state: SupervisorState, active: ActiveGroup, scores: Mapping[str, Mapping[str, Any]]) -> None:
    """Store the scores that a worker sent for its group; send them to later groups if they changed."""
    begun = [(name, scores[name]) for name in active.members if name in scores]
    new = {name: {"peers": str(score["peers"]), "bests": list(score["bests"])} for name, score in begun}
    if new != active.scores:
        active.scores = new
        send_to_later_groups(state, active, scores_of(active, active.members))


def group_ended(state: SupervisorState, active: ActiveGroup, outcomes: Mapping[str, Mapping[str, Any]]) -> None:
    """Send the final scores of a group that has ended, so that later groups no longer wait for it."""
    active.scores = {name: outcome["scores"] for name, outcome in outcomes.items() if outcome.get("scores")}
    active.scores = {n: s for n, s in active.scores.items() if outcomes[n]["status"] not in ("preempted", "cancelled")}
    send_to_later_groups(state, active, scores_of(active, active.members, running=False))
