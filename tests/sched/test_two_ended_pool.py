"""Places in one buffer: never overlapping, never beyond an end, whole again when everybody has gone."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from weft.sched.two_ended_pool import ALIGNMENT, HIGH, LOW, TwoEndedPool, padded

SIZES = st.integers(1, 5_000)
STEPS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(["put", "put", "put", "clear", "pack"]), SIZES, st.booleans()),
    max_size=60,
)
MANY = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def check(pool: TwoEndedPool) -> None:
    at = 0
    for place in pool.ranges:
        assert place.offset % ALIGNMENT == 0
        assert place.size % ALIGNMENT == 0
        assert place.offset >= at
        at = place.stop
    assert at <= pool.capacity
    assert pool.free + sum(place.size for place in pool.ranges) == pool.capacity // ALIGNMENT * ALIGNMENT


@MANY
@given(steps=STEPS, capacity=st.integers(0, 60_000))
def test_any_sequence(steps, capacity):
    pool = TwoEndedPool(capacity)
    for owner, what, size, high in steps:
        if what == "put":
            largest = max((stop - start for start, stop in pool.holes()), default=0)
            found = pool.put(owner, size, HIGH if high else LOW)
            assert (found is None) == (largest < padded(size))  # refused only if there is no such hole
        elif what == "clear":
            assert pool.clear(owner) >= 0
            assert pool.held(owner) == 0
        else:
            before, held = pool.free, pool.held(owner)
            pool.pack(owner)
            assert (pool.free, pool.held(owner)) == (before, held)
        check(pool)
    for owner in "abcd":
        pool.clear(owner)
    assert len(pool.holes()) <= 1
    check(pool)


@MANY
@given(steps=STEPS, owner=st.sampled_from("abcd"))
def test_moves_carry_the_bytes(steps, owner):
    """The moves of a pack, made in order in a real buffer, leave every place with what it held."""
    pool, buffer = TwoEndedPool(40_000), bytearray(40_448)
    for number, (name, what, size, high) in enumerate(steps):
        if what == "clear":
            pool.clear(name)
        elif (place := pool.put(name, size, HIGH if high else LOW)) is not None:
            buffer[place.offset : place.stop] = bytes([number % 251 + 1]) * place.size
    before = sorted(buffer[p.offset : p.stop] for p in pool.ranges)
    for move in pool.pack(owner):
        buffer[move.target : move.target + move.size] = bytes(buffer[move.source : move.source + move.size])
    assert sorted(buffer[p.offset : p.stop] for p in pool.ranges) == before


@MANY
@given(groups=st.lists(st.lists(SIZES, min_size=1, max_size=4), min_size=2, max_size=12))
def test_groups_in_turn_with_the_next_one_fetched_ahead_never_fragment(groups):
    """A pool as large as any two neighbours serves all groups, each fetched while the one before it runs."""
    totals = [sum(padded(size) for size in sizes) for sizes in groups]
    pool = TwoEndedPool(max(one + two for one, two in pairwise(totals)))
    for number, sizes in enumerate(groups):
        assert all(pool.put(str(number), size) is not None for size in sizes)
        pool.clear(str(number - 1))  # the group before it has ended
        pool.pack(str(number))  # and this one starts
        assert len(pool.holes()) <= 1
    assert len(pool.ranges) == len(groups[-1])


def test_the_two_ends():
    pool = TwoEndedPool(10 * ALIGNMENT)
    low, high = pool.put("graph", 1, LOW), pool.put("state", 513, HIGH)
    assert (low.offset, low.size) == (0, 512)
    assert (high.offset, high.stop) == (8 * 512, 10 * 512)
    assert pool.put("more", 8 * 512) is None
    assert pool.put("more", 7 * 512) is not None
    assert pool.free == 0
