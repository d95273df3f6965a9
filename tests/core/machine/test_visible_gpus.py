"""CUDA_VISIBLE_DEVICES as CUDA reads it."""

from __future__ import annotations

import pytest

from weft.core.gpus import names_uuids, visible_places

UUIDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33", "GPU-cc44"]


@pytest.mark.parametrize(("chosen", "places"), [
    (None, [0, 1, 2, 3]),
    ("", []),
    (" ", []),
    ("3", [3]),
    ("2,0", [2, 0]),
    (" 1 , 2 ", [1, 2]),
    ("0,", [0]),
    ("1x,2y", [1, 2]),
    ("-1", []),
    ("0,-1,1", [0]),
    ("0,4,1", [0]),
    ("none", []),
    ("all", []),
    ("1,1", []),
    ("GPU-cc44", [3]),
    ("GPU-bb,GPU-aa11", [2, 0]),
    ("GPU-aa", []),
    ("GPU-bb33,GPU-dd55,GPU-cc44", [2]),
    ("GPU-bb33,GPU-bb", []),
    ("GPU-bb33,0", [2]),
    ("0,GPU-bb33", [0]),
    ("MIG-1234", [0]),
    ("MIG-GPU-cc44/1/0,MIG-GPU-cc44/2/0", [0]),
])  # fmt: skip
def test_places_among_four(chosen, places):
    assert visible_places(chosen, UUIDS) == places
    assert visible_places(chosen, []) == []


def test_a_uuid_that_is_not_known_is_no_gpu():
    assert visible_places("GPU-aa11", ["", "GPU-aa11"]) == [1]
    assert visible_places("GPU-aa11", ["", ""]) == []


def test_whether_uuids_are_needed():
    assert names_uuids("GPU-aa11,GPU-bb33")
    assert not any(map(names_uuids, (None, "", "0,1", "MIG-1234")))
