"""Gathering rows on the CPU, whatever their width and type."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weft.core.errors import InputError
from weft.ops.sampling import gather_rows
from weft.ops.sampling.gather_rows import absent_cpu, gather_rows_cpu, gather_rows_torch

CASES = [
    (1, torch.float32),
    (3, torch.float32),
    (100, torch.float32),
    (7, torch.bfloat16),
    (3, torch.int8),
    (8, torch.float64),
]


@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("width", "dtype"), CASES)
def test_equals_indexing(width, dtype, ids, monkeypatch):
    monkeypatch.setattr(gather_rows, "BYTES_OF_A_SHARE", 16)
    x = (10 * torch.randn(50, width)).to(dtype)
    wanted = torch.tensor([3, 3, 0, 49, 7, *range(40)], dtype=ids)
    assert torch.equal(gather_rows_cpu(x, wanted), gather_rows_torch(x, wanted))
    part = x[:, : max(1, width - 1)]
    assert torch.equal(gather_rows_cpu(part, wanted), gather_rows_torch(part, wanted))
    assert gather_rows_cpu(x, wanted[:0]).shape == (0, width)


def test_into_given_memory_and_from_a_file(tmp_path):
    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(20, 5))
    mapped[:] = np.arange(100).reshape(20, 5)
    out = torch.full((3, 5), -1.0)
    assert gather_rows_cpu(torch.from_numpy(mapped), torch.tensor([19, 0, 4]), out) is out
    assert out[:, 0].tolist() == [95, 0, 20]


def test_memory_of_another_shape_is_refused():
    with pytest.raises(InputError, match=r"out must be contiguous torch.float32 \[3, 5\]"):
        gather_rows_cpu(torch.zeros(20, 5), torch.tensor([1, 2, 3]), torch.zeros(2, 5))
    with pytest.raises(InputError, match="contiguous rows"):
        gather_rows_cpu(torch.zeros(20, 5).T, torch.tensor([1, 2, 3]))


def test_rows_that_a_cache_lacks_are_found_with_their_places():
    ids, held = torch.tensor([7, 2, 5, 2, 0, 9], dtype=torch.int32), torch.zeros(10, dtype=torch.bool)
    held[[2, 9]] = True
    places = torch.empty_like(ids)
    found = absent_cpu(ids, held, places)
    assert found.tolist() == [7, 5, 0]
    assert places[: found.numel()].tolist() == [0, 2, 4]
    assert absent_cpu(ids, torch.ones(10, dtype=torch.bool), places).numel() == 0
    assert absent_cpu(ids[:0], held, places[:0]).numel() == 0
