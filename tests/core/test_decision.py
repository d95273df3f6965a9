"""Decisions that make no sense are refused."""

from __future__ import annotations

import pytest

from weft.core.decision import Decision
from weft.core.errors import SpecError


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
        Decision(0, **fields)
