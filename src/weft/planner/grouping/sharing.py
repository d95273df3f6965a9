"""Decide which stacks share a device: concurrent on streams, woven into one step, or in turn, and why."""

from __future__ import annotations

from weft.core.plan import FILLS_DEVICE
from weft.planner.grouping.limits import Limits, size_in_words
from weft.planner.grouping.similarity import Features, features_of_task, similarity
from weft.planner.grouping.stacks import StackDraft

ALIKE = 0.4  # similarity from which on stacks may be woven


def shared_groups(bundles: list[StackDraft], limits: Limits) -> list[tuple[list[StackDraft], list[str]]]:
    """Put bundles into groups, largest load first, each into the first (for weaving: most similar) that it fits."""
    if len(bundles) == 1:
        return [(bundles, [])]
    if not (limits.device == "cuda" if limits.weave is None else limits.weave):
        where = "on a CPU one operator runs at a time" if limits.device == "cpu" else "weave=False"
        return [([bundle], [f"stacks one after another: {where}"]) for bundle in bundles]
    groups: list[tuple[list[StackDraft], list[str]]] = []
    features = (
        {id(bundle): features_of_task(bundle.tasks[0], limits.stats) for bundle in bundles} if limits.weave else {}
    )
    for bundle in sorted(bundles, key=lambda b: (-b.load, b.places[0])):
        if limits.weave:
            _place_woven(bundle, groups, features, limits)
        else:
            _place_beside(bundle, groups, limits)
    for joined, _ in groups:
        joined.sort(key=lambda b: b.places[0])
    return groups


def _place_beside(bundle: StackDraft, groups: list[tuple[list[StackDraft], list[str]]], limits: Limits) -> None:
    alone = _trains_alone(bundle, limits)
    if alone is not None:
        groups.append(([bundle], [alone]))
        return
    refused: list[str] = []
    for joined, why in groups:
        if _trains_alone(joined[0], limits):
            continue
        obstacle = _no_room(bundle, joined, limits, "concurrent with")
        if obstacle is None:
            why.append(f"{_called(bundle)} concurrent with {_called(joined[0])}: neither fills the device")
            joined.append(bundle)
            return
        refused.append(obstacle)
    groups.append(([bundle], refused[:1]))


def _trains_alone(bundle: StackDraft, limits: Limits) -> str | None:
    """Why no other stack may train concurrently with this one, whatever fits; None if one may."""
    if bundle.tasks[0].traits is None:
        return f"{bundle.tasks[0].model_name} in a group of its own: the load of its operators is not known"
    if limits.stats.num_edges >= FILLS_DEVICE:
        return (
            f"stacks one after another: every kernel over {limits.stats.num_edges:,} edges fills the device by itself"
        )
    return None


def _place_woven(
    bundle: StackDraft,
    groups: list[tuple[list[StackDraft], list[str]]],
    features: dict[int, Features | None],
    limits: Limits,
) -> None:
    own = features[id(bundle)]
    if own is None:
        name = bundle.tasks[0].model_name
        groups.append(([bundle], [f"{name} not woven: its operators are not known before it is captured"]))
        return
    refused: list[str] = []
    for score, words, joined, why in _candidates(own, groups, features):
        obstacle = _obstacle(score, words, bundle, joined, limits)
        if obstacle is None:
            why.append(f"{_called(bundle)} woven with {_called(joined[0])}: similarity {score:.2f} ({words})")
            joined.append(bundle)
            return
        refused.append(obstacle)
    groups.append(([bundle], refused[:1]))


def _candidates(
    own: Features, groups: list[tuple[list[StackDraft], list[str]]], features: dict[int, Features | None]
) -> list[tuple[float, str, list[StackDraft], list[str]]]:
    """Groups by similarity, most similar first; a group is as similar as its least similar stack."""
    found = []
    for joined, why in groups:
        others = [features[id(bundle)] for bundle in joined]
        scores = [similarity(own, other) for other in others if other is not None]
        if len(scores) == len(joined):
            found.append((*min(scores), joined, why))
    return sorted(found, key=lambda item: -item[0])


def _obstacle(score: float, words: str, bundle: StackDraft, joined: list[StackDraft], limits: Limits) -> str | None:
    """Why ``bundle`` is not woven into a group; None if it may."""
    if score < ALIKE:
        name, other = _called(bundle), _called(joined[0])
        return f"{name} not woven with {other}: similarity {score:.2f} is below {ALIKE} ({words})"
    return _no_room(bundle, joined, limits, "woven with")


def _no_room(bundle: StackDraft, joined: list[StackDraft], limits: Limits, how: str) -> str | None:
    """Why ``bundle`` does not fit into a group, by load or by memory; None if it does."""
    apart = f"{_called(bundle)} not {how} {_called(joined[0])}"
    load = bundle.load + sum(b.load for b in joined)
    if load > 1.0:
        return f"{apart}: together they would be {load:.1f} times what fills the device"
    together = [task for b in (*joined, bundle) for task in b.tasks]
    if not limits.fits(together):
        assert limits.room is not None
        return f"{apart}: together {size_in_words(limits.bytes(together))} of {size_in_words(limits.room)}"
    return None


def _called(bundle: StackDraft) -> str:
    task = bundle.tasks[0]
    depth = f" of {task.layers} layers" if task.traits is not None else ""
    return f"{task.model_name}{depth} x {len(bundle.tasks)}"
