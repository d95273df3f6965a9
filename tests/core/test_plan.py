"""A plan is plain data for a group of tasks."""

from __future__ import annotations

import json

from weft.core.plan import Plan


def test_json_round_trip():
    plan = Plan(("a", "b", "c"), "woven", "cuda", True, why=("because",), stacks=((0, 2), (1,)), cost={"seconds": 0.5})
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert Plan.from_dict({**plan.to_dict(), "of a later version": 1}) == plan


def test_without_stacks_all_members_are_one():
    assert Plan(("a", "b"), "stacked").stack_members == ((0, 1),)
    assert Plan(("a", "b"), "woven", stacks=((1,), (0,))).stack_members == ((1,), (0,))


def test_in_words():
    assert str(Plan(("a",), why=("small",))) == "a: solo on cpu\n  - small"
    woven = Plan(tuple("abcdef"), "woven", stacks=((0, 1, 2), (3, 4, 5)))
    assert str(woven) == "6 tasks (a, b, c, d, ...): woven in 2 stacks on cpu"


def test_halves():
    first, second = Plan(tuple("abcde"), "stacked").halves()
    assert (first.members, first.join, second.members) == (("a", "b"), "stacked", ("c", "d", "e"))
    first, second = Plan(tuple("abc"), "woven", stacks=((0, 2), (1,))).halves()
    assert (first.members, first.join, first.stacks) == (("a", "c"), "stacked", ())
    assert (second.members, second.join) == (("b",), "solo")
    first, second = Plan(tuple("abcd"), "woven", stacks=((3,), (0,), (1, 2))).halves()
    assert second.members == ("a", "b", "c")
    assert second.stacks == ((0,), (1, 2))
