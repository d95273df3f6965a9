"""Random bits from counters, in int64 arithmetic: the same on every device and for every chunking.

The bits of element ``i`` are a SplitMix64 hash of (seed, stream, i). Integer arithmetic wraps alike on CPU
and GPU, so whatever is decided by comparing or reducing these bits as integers is equal on both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.ops.random_bits import GOLDEN64, MIX64_A, MIX64_B, signed64, splitmix_int

COIN_BITS = 16
COIN_SIDES = 1 << COIN_BITS


class Stream(IntEnum):
    """What a hash is for: no two uses of one seed may share bits."""

    DEGREE = 1
    OUT_DEGREE = 2
    LABEL = 3
    LABEL_NOISE = 4
    EDGE = 5
    CENTRE = 6
    NOISE = 7
    WORD_COUNT = 8
    WORD = 9
    RELATION = 10
    SPLIT = 11
    TASK_RATE = 12
    TASK = 13
    SCRAMBLE = 14


def stream_key(seed: int, *stream: int) -> int:
    """The int64 key of a stream of bits: the seed and the stream's numbers, mixed."""
    key = splitmix_int(seed & 0xFFFFFFFFFFFFFFFF)
    for number in stream:
        key = splitmix_int(key ^ splitmix_int(number))
    return signed64(key)


def _xor_shift_(bits: Tensor, shift: int) -> Tensor:
    return bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def hash_(key: int, counters: Tensor) -> Tensor:
    """64 random bits for each int64 counter, **in its place** (a chunk's temporaries bound the memory)."""
    counters.mul_(signed64(GOLDEN64)).add_(key)
    _xor_shift_(counters, 30).mul_(signed64(MIX64_A))
    _xor_shift_(counters, 27).mul_(signed64(MIX64_B))
    return _xor_shift_(counters, 31)


def hash_range(key: int, start: int, stop: int, device: torch.device | str) -> Tensor:
    """64 random bits for each of the counters ``start .. stop - 1``."""
    return hash_(key, torch.arange(start, stop, dtype=torch.int64, device=device))


def coin(bits: Tensor) -> Tensor:
    """An integer in ``[0, COIN_SIDES)`` from the low bits of a hash."""
    return bits & (COIN_SIDES - 1)


def coin_side(probability: float) -> int:
    """``coin(bits) < coin_side(p)`` is true with probability p (to 1 in 65,536)."""
    return round(min(max(probability, 0.0), 1.0) * COIN_SIDES)


def below(bits: Tensor, bound: Tensor | int) -> Tensor:
    """An integer in ``[0, bound)`` from the bits that :func:`coin` leaves; bounds up to 2^31 are unbiased
    to 1 in 65,536."""
    return torch.remainder((bits >> COIN_BITS) & ((1 << (64 - COIN_BITS)) - 1), bound)


def permutation(seed: int, stream: int, count: int, device: torch.device | str) -> Tensor:
    """A random permutation ``[count]`` int64 of ``0 .. count - 1``."""
    return torch.sort(hash_range(stream_key(seed, stream), 0, count, device), stable=True).indices


def spread_counts(counts: Tensor, seed: int, stream: int) -> Tensor:
    """Value ``v`` at ``counts[v]`` randomly chosen places: ``[sum(counts)]`` int32, exact for every seed."""
    device = counts.device
    total = int(counts.sum())
    values = torch.arange(counts.numel(), dtype=torch.int32, device=device)
    ranked = torch.repeat_interleave(values, counts, output_size=total)
    placed = torch.empty_like(ranked)
    placed[permutation(seed, stream, total, device)] = ranked
    return placed


# ---- Draw distinct pairs: propose, keep the new ones, propose again for those still missing
#
# A pair is an int64 key, so "distinct" is a sort. Every owner (a row, a block, the whole graph) requests a number of
# pairs; the draw of its j-th missing pair in round k hashes (k, slot of j). What is accepted depends on the set of
# keys alone, so the outcome is the same on every device and for every chunking by owners.

MAX_ROUNDS = 96

Propose = Callable[[Tensor, Tensor, int], Tensor]
OwnerOf = Callable[[Tensor], Tensor]


def distinct_keys(
    need: Tensor,
    first_slot: Tensor,
    propose: Propose,
    owner_of: OwnerOf,
    *,
    tag_bits: int = 0,
    pass_on: int = MAX_ROUNDS,
) -> Tensor:
    """Sorted keys ``[sum(need)]``: ``need[o]`` distinct ones for every owner o.

    ``propose(owners, slots, round)`` returns candidate keys (fewer than requested if it rejects some);
    ``owner_of(keys)`` gives their owners. The lowest ``tag_bits`` bits of a key do not count as identity:
    of two keys equal except for the tag, the smaller one stays. After ``pass_on`` rounds what an owner still misses
    is drawn by the next one: in a dense graph an owner may have no free place left.
    """
    total = missing = int(need.sum())
    accepted: list[Tensor] = []
    for attempt in range(MAX_ROUNDS):
        if missing == 0:
            break
        # For every missing pair its owner (int32) and its slot ``first_slot[owner] + j`` (int64).
        ids = torch.arange(need.numel(), dtype=torch.int32, device=need.device)
        owners = torch.repeat_interleave(ids, need, output_size=missing)
        shift = first_slot - (torch.cumsum(need, 0) - need)
        slots = torch.arange(missing, dtype=torch.int64, device=need.device).add_(shift.index_select(0, owners))
        fresh = sort_values(propose(owners, slots, attempt))
        del ids, owners, shift, slots
        pairs = fresh >> tag_bits if tag_bits else fresh
        distinct = torch.ones_like(fresh, dtype=torch.bool)
        torch.ne(pairs[1:], pairs[:-1], out=distinct[1:])
        fresh = fresh[distinct]
        for earlier in accepted:
            if earlier.numel():
                old, new = (earlier >> tag_bits, fresh >> tag_bits) if tag_bits else (earlier, fresh)
                nearest = torch.searchsorted(old, new).clamp_(max=old.numel() - 1)
                fresh = fresh[old[nearest] != new]
        accepted.append(fresh)
        missing -= fresh.numel()
        if missing:
            need = need - torch.bincount(owner_of(fresh), minlength=need.numel())
            need = need.roll(1) if attempt >= pass_on else need
    if missing:
        raise GraphError(
            f"{missing} of {total} edges found no free place in {MAX_ROUNDS} rounds: the requested graph is too "
            f"dense for distinct edges; choose fewer edges, more nodes or a lower max_degree"
        )
    if len(accepted) == 1:
        return accepted[0]
    return sort_values(torch.cat(accepted)) if accepted else need.new_empty(0, dtype=torch.int64)


def sort_values(keys: Tensor) -> Tensor:
    """The keys ascending, without the permutation; the memory of ``keys`` may be reused for them."""
    if keys.device.type == "cpu":
        # numpy's vectorised sort is several times faster than torch's, which also carries indices along.
        keys.numpy().sort()
        return keys
    return torch.sort(keys).values


# ---- Draw an item in proportion to its weight, from one class or from all others


@dataclass(frozen=True)
class Popularity:
    """M items with integer weights, laid end to end on a line, class after class.

    ``order [M]`` int32 items by class, ``ends [M]`` int64 where each item's stretch of the line ends;
    ``begin [C]``, ``weight [C]`` int64 the stretch of every class; ``total`` the length of the line.
    """

    order: Tensor
    ends: Tensor
    begin: Tensor
    weight: Tensor
    total: int

    @classmethod
    def of(cls, weights: Tensor, classes: Tensor, num_classes: int) -> Popularity:
        """From ``weights [M]`` and ``classes [M]`` (integers)."""
        order = torch.sort(classes, stable=True).indices.to(torch.int32)
        ends = torch.cumsum(weights.index_select(0, order), 0, dtype=torch.int64)
        per_class = torch.zeros(num_classes, dtype=torch.int64, device=weights.device)
        per_class.index_add_(0, classes.to(torch.int64), weights.to(torch.int64))
        begin = torch.cumsum(per_class, 0) - per_class
        return cls(order, ends, begin, per_class, int(per_class.sum()))

    def at(self, position: Tensor) -> Tensor:
        """The item int32 whose stretch covers each position of the line."""
        rank = torch.searchsorted(self.ends, position, right=True, out_int32=True)
        return self.order.index_select(0, rank)

    def draw(self, bits: Tensor, classes: Tensor, same_side: Tensor) -> Tensor:
        """One item per hash: of the given class when its coin falls under ``same_side [C]``, else of another.

        ``bits`` int64 and ``classes`` int32 are ``[B]``; returns items ``[B]`` int32.
        """
        weight = self.weight.index_select(0, classes)
        same = coin(bits) < same_side.index_select(0, classes)
        # A class without items, or the only class there is, leaves no choice.
        same.logical_and_(weight > 0).logical_or_(weight == self.total)
        position = below(bits, torch.where(same, weight, self.total - weight))
        begin = self.begin.index_select(0, classes)
        beyond = weight.mul_(position >= begin)  # another class: skip over one's own stretch
        return self.at(position.add_(torch.where(same, begin, beyond)))
