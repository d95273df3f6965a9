"""Match operators of several steps that can be merged, in rounds, and order everything.

A *lane* is one member's step as a sequence of nodes with their dependencies; some nodes have a *key*, and nodes of
equal keys can be merged. A round takes nodes of one key that are ready in their lanes, that is, whose keyed
predecessors have all been taken by earlier rounds. So every path through the merged steps meets rounds in rising
order, and merging the nodes of a round cannot create a cycle.

The choice of the next key decides how many rounds there are. A key that will not become ready in any further lane is
taken at once. If another lane will reach it later, its lanes wait and other keys go first: four models of 2, 2, 3 and
4 layers meet in 4 forward and 4 backward rounds. If every key will still be reached by another lane, the one with the
most work behind it goes. A *lazy* key has no urgent readers, and goes when nothing else is ready. This module does not
depend on tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

Place = tuple[int, int]  # (lane, node)
Round = tuple[Place, ...]


@dataclass(frozen=True)
class Lane:
    """``keys[n]``: what node n is matched by (None: by nothing); ``before[n]``: the nodes it comes after, all < n."""

    keys: tuple[Hashable | None, ...]
    before: tuple[tuple[int, ...], ...]

    @cached_property
    def keyed(self) -> tuple[int, ...]:
        """The nodes that have a key, in order."""
        return tuple(node for node, key in enumerate(self.keys) if key is not None)

    @cached_property
    def needs(self) -> dict[int, int]:
        """For every keyed node, the keyed nodes that come before it on any path, as a set of bits."""
        bit = {node: 1 << place for place, node in enumerate(self.keyed)}
        above: list[int] = []
        for before in self.before:
            mask = 0
            for node in before:
                mask |= above[node] | bit.get(node, 0)
            above.append(mask)
        return {node: above[node] for node in self.keyed}

    @cached_property
    def chain(self) -> dict[int, int]:
        """For every keyed node, how many keyed nodes follow one another from it on, itself included."""
        longest = [0] * len(self.keys)
        for node in reversed(range(len(self.keys))):
            longest[node] += self.keys[node] is not None
            for before in self.before[node]:
                longest[before] = max(longest[before], longest[node])
        return {node: longest[node] for node in self.keyed}


class _Progress:
    """How far the rounds have come in one lane."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.done = 0
        self.left = dict.fromkeys(lane.keyed)  # an ordered set
        self.count = Counter(lane.keys[node] for node in lane.keyed)
        self._bit = {node: 1 << place for place, node in enumerate(lane.keyed)}

    def ready(self) -> dict[Hashable, list[int]]:
        """The nodes whose keyed predecessors are all done, by key."""
        found: dict[Hashable, list[int]] = {}
        needs, keys, missing = self.lane.needs, self.lane.keys, ~self.done
        for node in self.left:
            if not needs[node] & missing:
                found.setdefault(keys[node], []).append(node)
        return found

    def take(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            del self.left[node]
            self.count[self.lane.keys[node]] -= 1
            self.done |= self._bit[node]


def match(lanes: Sequence[Lane], lazy: Container[Hashable] = ()) -> list[Round]:
    """The rounds, as few as can be found: every keyed node of every lane in exactly one of them."""
    found = [waiting(lanes, lazy), longest_first(lanes, lazy)]
    return min([*found, levels(lanes)] if not lazy else found, key=len)


Rank = Callable[[Hashable, Sequence[_Progress], Sequence[dict[Hashable, list[int]]]], tuple[int, ...]]


def waiting(lanes: Sequence[Lane], lazy: Container[Hashable] = ()) -> list[Round]:
    """Rounds that wait for lanes that will still reach a key."""
    return _one_by_one(lanes, lazy, _fewest_missed)


def longest_first(lanes: Sequence[Lane], lazy: Container[Hashable] = ()) -> list[Round]:
    """Rounds by the longest chain of remaining nodes: the lane that has it never waits."""
    return _one_by_one(lanes, lazy, _longest_chain)


def _one_by_one(lanes: Sequence[Lane], lazy: Container[Hashable], rank: Rank) -> list[Round]:
    """Rounds, the key of each the one that ranks highest among those that are ready."""
    progress = [_Progress(lane) for lane in lanes]
    ready = [lane.ready() for lane in progress]
    rounds: list[Round] = []
    while any(ready):
        keys = dict.fromkeys(key for found in ready for key in found)
        hurried = [key for key in keys if key not in lazy]
        key = max(hurried or keys, key=lambda key: rank(key, progress, ready))
        taken = tuple((place, node) for place, found in enumerate(ready) for node in found.get(key, ()))
        for place, found in enumerate(ready):
            if key in found:
                progress[place].take(found[key])
                ready[place] = progress[place].ready()
        rounds.append(taken)
    return rounds


def _fewest_missed(
    key: Hashable, progress: Sequence[_Progress], ready: Sequence[dict[Hashable, list[int]]]
) -> tuple[int, ...]:
    """Highest if no further lane will reach the key; ties by the most work behind it, then by the most nodes."""
    missed = sum(lane.count[key] > 0 and key not in found for lane, found in zip(progress, ready, strict=True))
    behind = sum(len(lane.left) for lane, found in zip(progress, ready, strict=True) if key in found)
    return missed == 0, behind, sum(len(found.get(key, ())) for found in ready)


def _longest_chain(
    key: Hashable, progress: Sequence[_Progress], ready: Sequence[dict[Hashable, list[int]]]
) -> tuple[int, ...]:
    """The most nodes in a row behind the key; the most nodes of it break ties."""
    nodes = [(lane.lane, node) for lane, found in zip(progress, ready, strict=True) for node in found.get(key, ())]
    return max(lane.chain[node] for lane, node in nodes), len(nodes)


def levels(lanes: Sequence[Lane]) -> list[Round]:
    """Rounds by depth: nodes match that have a key and the longest chain of keyed predecessors in common."""
    rounds: dict[tuple[int, Hashable], list[Place]] = {}
    for place, lane in enumerate(lanes):
        depth: dict[int, int] = {}
        for node in lane.keyed:
            above = [depth[other] for k, other in enumerate(lane.keyed) if lane.needs[node] >> k & 1]
            depth[node] = 1 + max(above, default=-1)
            rounds.setdefault((depth[node], lane.keys[node]), []).append((place, node))
    return [tuple(nodes) for _, nodes in sorted(rounds.items(), key=lambda item: item[0][0])]


def in_order(lanes: Sequence[Lane], rounds: Sequence[Round]) -> Iterator[Round]:
    """Every node once, those of a round together, each after all it depends on.

    Before a round each of its lanes runs as far as it would have run alone, and a lane that meets no further round
    runs to its end: so tensors die about as early as they do alone.
    """
    pending = [dict.fromkeys(range(len(lane.keys))) for lane in lanes]
    left = Counter(place for round_ in rounds for place, _ in round_)

    def run(place: int, last: int) -> Iterator[Round]:
        lane, here = lanes[place], pending[place]
        for node in [node for node in here if node < last]:
            if lane.keys[node] is None and not any(before in here for before in lane.before[node]):
                del here[node]
                yield ((place, node),)

    for place in range(len(lanes)):
        if not left[place]:
            yield from run(place, len(lanes[place].keys))
    for round_ in rounds:
        ends = dict(round_)  # the last one of each lane
        for place, node in ends.items():
            yield from run(place, node)
        for place, node in round_:
            del pending[place][node]
        yield round_
        left.subtract(place for place, _ in round_)
        for place in ends:
            if not left[place]:
                yield from run(place, len(lanes[place].keys))
