"""The losses of small runs of every kind are those that were recorded."""

from __future__ import annotations

import json

import pytest

from tests.behaviour.cases import CASES, GOLDENS, TRAININGS, losses

RECORDED = json.loads(GOLDENS.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in TRAININGS for name in CASES[kind]()])
def test_losses_are_as_recorded(kind, name):
    found = losses(kind, name)
    assert found.keys() == RECORDED[kind][name].keys()
    for member, values in RECORDED[kind][name].items():
        assert found[member] == pytest.approx(values, rel=1e-5, abs=1e-5), member
