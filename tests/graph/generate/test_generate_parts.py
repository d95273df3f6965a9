"""The parts of the generators: hashing, degree histograms, distinct pairs, chunking."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from weft.core.errors import GraphError
from weft.graph.generate.citation import bell_noise, dense_features
from weft.graph.generate.draws import Popularity, below, coin, distinct_keys, hash_range, permutation, stream_key
from weft.graph.generate.wiring import degree_histogram, directed_csr, planted_draw, row_chunks

MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """The published finaliser, in Python's own integers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def test_the_hash_is_splitmix64_of_its_counter():
    key = stream_key(5, 1, 2)
    expected = [splitmix64((i * 0x9E3779B97F4A7C15 + key) & MASK) for i in range(1_000, 1_050)]
    assert [int(bits) & MASK for bits in hash_range(key, 1_000, 1_050, "cpu")] == expected


def test_bits_do_not_depend_on_where_a_range_is_cut():
    whole = hash_range(stream_key(1, 2), 0, 100, "cpu")
    parts = [hash_range(stream_key(1, 2), begin, begin + 25, "cpu") for begin in range(0, 100, 25)]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, hash_range(stream_key(1, 3), 0, 100, "cpu"))


def test_draws_are_even():
    bits = hash_range(stream_key(0, 1), 0, 70_000, "cpu")
    sides = torch.bincount(below(bits, 7), minlength=7)
    assert int((sides - 10_000).abs().max()) < 400
    assert (coin(bits) < 16_384).float().mean() == pytest.approx(0.25, abs=0.01)
    assert torch.equal(permutation(3, 1, 500, "cpu").sort().values, torch.arange(500))


def test_noise_is_bell_shaped():
    noise = bell_noise(0, 200_000, 0, "cpu")
    assert noise.mean().abs() < 0.01
    assert noise.std() == pytest.approx(1.0, abs=0.01)
    assert (noise.abs() < 1).float().mean() == pytest.approx(0.683, abs=0.02)
    assert noise.abs().max() < 3.5


def test_features_do_not_depend_on_the_row_chunk(monkeypatch):
    classes = torch.arange(50, dtype=torch.int32) % 3
    options = {"signal": 1.0, "dtype": torch.float32, "seed": 4}
    whole = dense_features(classes, 6, 3, **options)
    monkeypatch.setattr(sys.modules[dense_features.__module__], "CHUNK_VALUES", {"cpu": 40})
    assert torch.equal(whole, dense_features(classes, 6, 3, **options))


@pytest.mark.parametrize(
    ("nodes", "total", "top"),
    [(2_708, 5_429, 84), (100, 50, 10), (10, 10, 7), (10, 12, 7), (1_000, 1_060, 3), (50, 2_000, 45), (7, 0, 3)],
)
def test_degrees_add_up_exactly(nodes, total, top):
    counts = degree_histogram(nodes, total, exponent=2.5, max_degree=top)
    assert counts.sum() == nodes
    assert np.dot(counts, np.arange(counts.size)) == total
    assert counts.min() >= 0
    assert counts.size == top + 1
    assert total < nodes or counts[0] == 0


def test_the_tail_falls_as_the_exponent_says():
    counts = degree_histogram(10**7, 10**8, exponent=2.5, max_degree=20_000)
    at_least = counts[::-1].cumsum()[::-1]
    slope = np.log(at_least[4_000] / at_least[400]) / np.log(10)
    assert slope == pytest.approx(-1.5, abs=0.15)


def test_a_class_draws_its_own_and_all_others_by_weight():
    weights, classes = torch.tensor([1, 3, 2, 2]), torch.tensor([0, 1, 0, 1])
    popularity = Popularity.of(weights, classes, 2)
    bits = hash_range(stream_key(0, 1), 0, 40_000, "cpu")
    zeros = torch.zeros(40_000, dtype=torch.int32)
    own = popularity.draw(bits, zeros, torch.tensor([1 << 16, 1 << 16]))
    other = popularity.draw(bits, zeros, torch.tensor([0, 0]))
    shares = [torch.bincount(items.long(), minlength=4) / 40_000 for items in (own, other)]
    torch.testing.assert_close(shares[0], torch.tensor([1 / 3, 0, 2 / 3, 0]), atol=0.02, rtol=0)
    torch.testing.assert_close(shares[1], torch.tensor([0, 0.6, 0, 0.4]), atol=0.02, rtol=0)


@pytest.mark.parametrize("chunk", [1, 17, 400])
def test_rows_do_not_depend_on_the_chunk(chunk):
    degrees = torch.tensor([0, 5, 30, 1, 0, 12, 40, 7] * 6, dtype=torch.int32)
    classes = torch.arange(48, dtype=torch.int32) % 4
    popularity = Popularity.of(torch.arange(1, 49), classes, 4)
    draw = planted_draw(classes, popularity, torch.full((4,), 40_000), 48, 9, 5)
    indptr, indices = directed_csr(degrees, 48, draw, loops=False)
    cut_indptr, cut_indices = directed_csr(degrees, 48, draw, loops=False, chunk=chunk)
    assert torch.equal(indptr, cut_indptr)
    assert torch.equal(indices, cut_indices)
    assert torch.equal(indptr.diff(), degrees)
    for row in range(48):
        columns = indices[indptr[row] : indptr[row + 1]]
        assert (columns.diff() > 0).all()
        assert row not in columns


def test_row_chunks_cover_all_rows_once():
    indptr = torch.tensor([0, 3, 3, 10, 11, 12, 12])
    assert list(row_chunks(indptr, 4)) == [(0, 2), (2, 3), (3, 6)]
    assert list(row_chunks(indptr, 100)) == [(0, 6)]


def test_asking_for_more_pairs_than_there_are_is_an_error():
    need = torch.tensor([5])
    with pytest.raises(GraphError, match="2 of 5 edges found no free place"):
        distinct_keys(need, torch.zeros_like(need), lambda owners, slots, k: slots % 3, torch.zeros_like)
