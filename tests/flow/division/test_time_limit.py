"""Parts share what is left of a limit."""

from __future__ import annotations

from weft.batches.division.measuring import TimeLimit


def test_what_a_part_does_not_use_is_left_to_the_others():
    now = [100.0]
    limit = TimeLimit(10.0, 5.0, lambda: now[0])
    assert limit.part(2.0) == 4.0
    now[0] += 1.0
    assert limit.part() == 3.0
    now[0] += 8.5
    assert limit.part() == 0.25
    now[0] += 2.0
    assert limit.part() == 0.0


def test_more_parts_than_were_announced_get_what_is_left():
    limit = TimeLimit(6.0, 1.0, lambda: 0.0)
    assert limit.part() == 6.0
    assert limit.part() == 6.0
