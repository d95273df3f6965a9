"""Fan-outs: how many neighbours a sampler takes per hop, of all relations together or of each.

A hop is a number (of all relations together; -1: all neighbours), a list with a number per relation, or a mapping from
relations to numbers, where ``each`` stands for those that are not named (0 otherwise). Tasks keep a mapping as sorted
pairs, which can be hashed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.core.errors import InputError, SpecError
from weft.core.graph_stats import GraphStats

EACH = "each"
MOST_PICKS = 10_000_000  # of a hop: as many as anything that is counted
Pairs = tuple[tuple[int | str, int], ...]
Hop = int | tuple[int, ...] | Pairs
SHAPE = (
    "must list neighbours per hop, such as [15, 10, 5] (-1: all), or per hop and relation, such as "
    '[{"each": 3}, {"0": 5, "2": -1}]'
)


def read_fanout(where: str, fanout: Any) -> tuple[Hop, ...]:
    """The fan-outs of a task as it keeps them, or a :class:`SpecError` that begins with ``where`` and names them."""
    if not isinstance(fanout, (list, tuple)) or not fanout:
        raise SpecError(f"{where}fanout={fanout!r} {SHAPE}")
    hops = [_read_hop(hop) for hop in fanout]
    good = tuple(hop for hop in hops if hop is not None)
    if len(good) < len(hops):
        raise SpecError(f"{where}fanout={fanout!r} {SHAPE}")
    most = max(_largest(hop) for hop in good)
    if most > MOST_PICKS:
        raise SpecError(f"{where}fanout={fanout!r}: {most:,} neighbours are more than {MOST_PICKS:,}; -1 takes all")
    return good


def _largest(hop: Hop) -> int:
    """The largest number of a hop."""
    if isinstance(hop, int):
        return hop
    return max(part[1] if isinstance(part, tuple) else part for part in hop)


def _read_hop(hop: Any) -> Hop | None:
    """One hop in the form that is kept; None if it is not one."""
    if _is_count(hop):
        return hop if hop == -1 or hop >= 1 else None
    if isinstance(hop, Mapping):
        return _read_pairs(list(hop.items()))
    if not isinstance(hop, (list, tuple)) or not hop:
        return None
    if all(isinstance(part, (list, tuple)) and len(part) == 2 for part in hop):
        return _read_pairs([tuple(part) for part in hop])
    good = all(_is_count(k) and k >= -1 for k in hop) and any(hop)
    return tuple(hop) if good else None


def _read_pairs(items: list[tuple[Any, Any]]) -> Pairs | None:
    found: dict[int | str, int] = {}
    for key, count in items:
        name = int(key) if isinstance(key, str) and key.isdecimal() else key
        if not (name == EACH or (_is_count(name) and name >= 0)) or not _is_count(count) or count < -1:
            return None
        found[name] = count
    return tuple(sorted(found.items(), key=lambda pair: (pair[0] != EACH, pair[0]))) if any(found.values()) else None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_per_relation(hop: Any) -> bool:
    """Whether a hop takes neighbours of each relation apart."""
    return not _is_count(hop)


def plain_hop(hop: Hop) -> Any:
    """A hop for JSON, which :func:`read_fanout` reads back."""
    if isinstance(hop, int):
        return hop
    return {str(key): count for key, count in hop} if isinstance(hop[0], tuple) else list(hop)


def show_hop(hop: Hop) -> str:
    """A hop in words."""
    if isinstance(hop, int):
        return _show_count(hop)
    if not isinstance(hop[0], tuple):
        return f"{', '.join(_show_count(k) for k in hop)} by relation"
    words = (f"{_show_count(k)} {'of each relation' if r == EACH else f'of relation {r}'}" for r, k in hop)
    return " and ".join(words)


def _show_count(count: int) -> str:
    return "all" if count < 0 else str(count)


def resolve(
    fanouts: Sequence[Any], num_relations: int, relation_edges: Sequence[int]
) -> tuple[int | tuple[int, ...], ...]:
    """Every hop as a number, or as a number per relation of a graph; an :class:`InputError` if that does not fit."""
    return tuple(_resolved(hop, num_relations, relation_edges) for hop in read_fanout("", list(fanouts)))


def _resolved(hop: Hop, relations: int, edges: Sequence[int]) -> int | tuple[int, ...]:
    if isinstance(hop, int):
        return hop
    if not relations:
        raise InputError("fan-outs per relation need a graph whose edges have relations; give one number per hop")
    if not isinstance(hop[0], tuple):
        if len(hop) != relations:
            raise InputError(f"a hop of fanout has {len(hop)} numbers, but the graph has {relations} relations")
        return hop
    given: dict[int | str, int] = dict(hop)
    for relation, count in given.items():
        if isinstance(relation, int) and relation >= relations:
            raise InputError(f"fanout names relation {relation}, but the graph has relations 0 to {relations - 1}")
        if isinstance(relation, int) and count and edges and not edges[relation]:
            raise InputError(f"fanout names relation {relation}, of which the graph has no edges; leave it out")
    return tuple(given.get(relation, given.get(EACH, 0)) for relation in range(relations))


def most_picks(hop: int | tuple[int, ...]) -> int:
    """Neighbours that a node has at most in a resolved hop; -1: as many as there are."""
    if isinstance(hop, int):
        return hop
    return -1 if min(hop) < 0 else sum(hop)


def picks_per_hop(fanouts: Sequence[Hop], stats: GraphStats) -> list[int]:
    """Neighbours that a node of a graph has at most in every hop; -1: as many as there are."""
    return [most_picks(hop) for hop in resolve(fanouts, stats.num_relations, stats.relation_edges)]
