"""Draw distinct pairs: propose, keep the new ones, propose again for those still missing.

A pair is an int64 key, so "distinct" is a sort. Every owner (a row, a block, the whole graph) requests a
number of pairs; the draw of its j-th missing pair in round k hashes (k, slot of j). What is accepted depends
on the set of keys alone, so the outcome is the same on every device and for every chunking by owners.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.core.errors import GraphError

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
    total = wanted = int(need.sum())
    found: list[Tensor] = []
    for attempt in range(MAX_ROUNDS):
        if wanted == 0:
            break
        owners, slots = _expand(need, first_slot, wanted)
        fresh = _without_repeats(sort_values(propose(owners, slots, attempt)), tag_bits)
        del owners, slots
        for earlier in found:
            fresh = fresh[~_contains(earlier, fresh, tag_bits)]
        found.append(fresh)
        wanted -= fresh.numel()
        if wanted:
            need = need - torch.bincount(owner_of(fresh), minlength=need.numel())
            need = need.roll(1) if attempt >= pass_on else need
    if wanted:
        raise GraphError(
            f"{wanted} of {total} edges found no free place in {MAX_ROUNDS} rounds: the requested graph is too "
            f"dense for distinct edges; ask for fewer edges, more nodes or a lower max_degree"
        )
    if len(found) == 1:
        return found[0]
    return sort_values(torch.cat(found)) if found else need.new_empty(0, dtype=torch.int64)


def sort_values(keys: Tensor) -> Tensor:
    """The keys ascending, without the permutation; the memory of ``keys`` may be reused for them."""
    if keys.device.type == "cpu":
        # numpy's vectorised sort is several times faster than torch's, which also carries indices along.
        keys.numpy().sort()
        return keys
    return torch.sort(keys).values


def _expand(need: Tensor, first_slot: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """For every missing pair its owner (int32) and its slot ``first_slot[owner] + j`` (int64)."""
    ids = torch.arange(need.numel(), dtype=torch.int32, device=need.device)
    owners = torch.repeat_interleave(ids, need, output_size=total)
    shift = first_slot - (torch.cumsum(need, 0) - need)
    slots = torch.arange(total, dtype=torch.int64, device=need.device)
    return owners, slots.add_(shift.index_select(0, owners))


def _without_repeats(keys: Tensor, tag_bits: int) -> Tensor:
    pairs = keys >> tag_bits if tag_bits else keys
    new = torch.ones_like(keys, dtype=torch.bool)
    torch.ne(pairs[1:], pairs[:-1], out=new[1:])
    return keys[new]


def _contains(earlier: Tensor, keys: Tensor, tag_bits: int) -> Tensor:
    if earlier.numel() == 0:
        return torch.zeros_like(keys, dtype=torch.bool)
    known, asked = (earlier >> tag_bits, keys >> tag_bits) if tag_bits else (earlier, keys)
    place = torch.searchsorted(known, asked).clamp_(max=known.numel() - 1)
    return known[place] == asked
