"""Updates and decisions as plain data: through JSON and back, and refused where they make no sense."""

from __future__ import annotations

import json
import math

import pytest

from weft.core.decision import Decision, GroupOutline, MemberOutline, Stop, Update
from weft.core.errors import SpecError


def test_a_decision_goes_through_json():
    decision = Decision(16, 8, (Stop("a", "pruned", "why"),), ("a", "b"), save=True)
    assert Decision.from_json(decision.to_json()) == decision
    assert Decision.from_json(Decision(3, finish=True, reason="preempted").to_json()).reason == "preempted"


def test_an_outline_goes_through_json():
    outline = GroupOutline((MemberOutline("a", 20, 3, "val_accuracy on g"), MemberOutline("b", 30)), "cuda", True)
    assert GroupOutline.from_dict(json.loads(json.dumps(outline.to_dict()))) == outline


def test_updates_go_through_json_bit_for_bit():
    row = (0.1 + 0.2, math.nan, math.inf, -math.inf, 5e-324)
    for sent in (Update("a", 4, (row,), 9, 4, 0.5, epochs=5, steps=5, seconds=0.25), Update("b", 0, (), 7)):
        assert repr(Update.from_dict(json.loads(json.dumps(sent.to_dict())))) == repr(sent)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"advance": -1}, "advance=-1 must be a number of epochs"),
        ({"advance": 1.5}, r"advance=1\.5 must be a number of epochs"),
        ({"advance": 3, "pause": True}, "advance=3 must be 0 for a session that pauses"),
        ({"finish": True, "reason": "bored"}, "reason='bored' must be one of"),
    ],
)
def test_decisions_that_make_no_sense(fields, message):
    with pytest.raises(SpecError, match=message):
        Decision.from_dict({"epoch": 0, **fields})
