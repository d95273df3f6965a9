"""Matching in rounds, on steps without tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.weave.merge import Lane, in_order, match


def chain(*keys: str | None) -> Lane:
    """Nodes one after another."""
    return Lane(keys, tuple((place - 1,) if place else () for place in range(len(keys))))


def stack(layers: int, forward: str = "A", backward: str = "At") -> Lane:
    """A model's step: an aggregation and a dense operator a layer, then the same backwards."""
    return chain(*[forward, None] * layers, *[None, backward] * layers, None)


@st.composite
def lanes(draw: st.DrawFn) -> Lane:
    """Any small directed acyclic graph, some of its nodes with keys."""
    size = draw(st.integers(0, 9))
    keys = draw(st.lists(st.sampled_from([None, None, "a", "b", "c"]), min_size=size, max_size=size))
    before = [
        tuple(sorted(draw(st.sets(st.integers(0, node - 1), max_size=3)))) if node else () for node in range(size)
    ]
    return Lane(tuple(keys), tuple(before))


def assert_sound(given_lanes: list[Lane], rounds) -> None:
    """Every keyed node in one round of its key, everything in an order that respects every dependency."""
    taken = [place for round_ in rounds for place in round_]
    assert sorted(taken) == sorted((m, n) for m, lane in enumerate(given_lanes) for n in lane.keyed)
    for round_ in rounds:
        assert len({given_lanes[m].keys[n] for m, n in round_}) == 1
    ordered = list(in_order(given_lanes, rounds))
    assert sorted(place for step in ordered for place in step) == sorted(
        (m, n) for m, lane in enumerate(given_lanes) for n in range(len(lane.keys))
    )
    when = {place: number for number, step in enumerate(ordered) for place in step}
    for m, lane in enumerate(given_lanes):
        for node, before in enumerate(lane.before):
            assert all(when[m, other] < when[m, node] for other in before)
    assert [step for step in ordered if step in set(rounds)] == list(rounds)


@given(st.lists(lanes(), max_size=5))
def test_any_steps_merge_without_a_cycle(given_lanes):
    assert_sound(given_lanes, match(given_lanes))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_models_of_one_kind_need_no_more_rounds_than_the_deepest(depths):
    given_lanes = [stack(layers) for layers in depths]
    assert len(match(given_lanes)) == 2 * max(depths)


def test_two_two_three_and_four_layers():
    given_lanes = [stack(layers) for layers in (2, 2, 3, 4)]
    rounds = match(given_lanes)
    assert [len(round_) for round_ in rounds] == [4, 4, 2, 1, 4, 4, 2, 1]


def test_forward_waits_for_nobody_who_cannot_come():
    """The shallow one's gradient waits for the deep one's, which needs all of its own forward first."""
    rounds = match([stack(1), stack(3)])
    assert [sorted(place for place, _ in round_) for round_ in rounds][:3] == [[0, 1], [1], [1]]
    assert len(rounds) == 6


def test_different_structures_do_not_match_but_share_the_order():
    given_lanes = [stack(2, "A", "At"), stack(2, "B", "Bt")]
    assert len(match(given_lanes)) == 8
    assert_sound(given_lanes, match(given_lanes))


def test_branches_of_one_step_match_each_other():
    fork = Lane(("a", "a", None), ((), (), (0, 1)))
    assert match([fork]) == [((0, 0), (0, 1))]


@pytest.mark.parametrize("given_lanes", [[], [Lane((), ())], [chain(None, None)]])
def test_nothing_to_match(given_lanes):
    assert match(given_lanes) == []
    assert_sound(given_lanes, [])
