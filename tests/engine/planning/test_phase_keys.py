"""Measured phases are taken for those of groups and hardware that are alike, and for no others."""

from __future__ import annotations

import pytest

import weft
from examples.thread_accelerator import ThreadAccelerator
from weft.core.placement import DataPlacement
from weft.engine.choosing import phases_key

GAT = {"graph": "demo", "model": "gat", "mode": "sampled", "fanout": [5, 3], "heads": 2}


def key(trainer="gpu", **settings) -> str:
    return phases_key([weft.Task(**GAT | settings)], DataPlacement(), "graph", trainer)


@pytest.mark.parametrize("other", [{"heads": 4}, {"norm": "layer"}, {"residual": True}, {"hidden": 8}, {"batch": 7}])
def test_other_models_have_other_keys(other):
    assert key() != key(**other)


@pytest.mark.parametrize("same", [{"lr": 0.5}, {"seed": 3}, {"epochs": 7}, {"name": "other"}])
def test_numbers_alone_do_not_count(same):
    assert key() == key(**same)


def test_accelerators_of_another_pace_have_other_keys():
    paces = [None, {"batching_npu": 0.1}, {"batching_npu": 0.2}, lambda _phase: 0.1]
    made = [ThreadAccelerator("npu", pace) for pace in paces]
    again = ThreadAccelerator("npu", {"batching_npu": 0.1})
    for one in (*made, again):
        one.stop()
    assert len({key(one.profile_key) for one in made}) == len(paces)
    assert again.profile_key == made[1].profile_key
