"""Estimates of sharded tasks: what one rank takes, and which tasks are sharded because they fit no device."""

from __future__ import annotations

import pytest

import weft
from weft.core.run_options import RunOptions
from weft.serve.estimates import estimate_of

MIB = 1 << 20
LARGE = {"graph": "shape:ogbn-arxiv", "model": "gcn", "hidden": 2048, "layers": 3, "epochs": 10}


def estimate(room=None, devices=1, ranks=1, **changes):
    return estimate_of(weft.Task(**{**LARGE, "mode": "full", **changes}), "cpu", RunOptions(ranks=ranks), room, devices)


@pytest.fixture(scope="module")
def alone():
    return estimate()


def test_a_rank_takes_less_than_the_whole(alone):
    two, four = estimate(ranks=2), estimate(ranks=4)
    assert (two["ranks"], four["ranks"]) == (2, 4)
    assert "ranks" not in alone
    assert alone["bytes"] > two["bytes"] > four["bytes"]
    assert two["runnable"] is None, "the worker plans a sharded task"


def test_a_task_that_fits_no_device_is_sharded_over_the_fewest_that_hold_it(alone):
    sizes = {ranks: estimate(ranks=ranks)["bytes"] for ranks in (2, 3)}
    over_three = estimate(room=sizes[3], devices=8)
    assert (over_three["ranks"], over_three["bytes"]) == (3, sizes[3])
    assert "each of 3 ranks: alone it needs" in over_three["why"]
    assert estimate(room=sizes[2], devices=8)["ranks"] == 2
    assert "ranks" not in estimate(room=alone["bytes"], devices=8), "it fits"


def test_without_enough_devices_it_stays_whole(alone):
    room = estimate(ranks=3)["bytes"]
    for devices in (1, 2):
        assert estimate(room=room, devices=devices)["bytes"] == pytest.approx(alone["bytes"], rel=0.01)


def test_a_task_that_may_be_sampled_is_sampled_instead():
    small = {"graph": "shape:pubmed", "model": "gin", "hidden": 256, "layers": 4}
    whole = weft.plan(weft.Task(**small, epochs=LARGE["epochs"], mode="full"), machine="cpu").peak_bytes
    free = estimate(whole - 1, devices=8, **small, mode="auto")
    assert free["mode"] == "sampled"
    assert "ranks" not in free


def test_an_own_model_is_not_sharded_by_itself():
    own = estimate(room=400 * MIB, devices=8, model="tests.dist.cases:TwoBranches", hidden=512)
    assert "ranks" not in own
