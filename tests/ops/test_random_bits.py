"""Counter-based bits: known values, equal in torch and in numba, uniform, independent."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from tests.ops.bits import bits_of, key_of
from weft.ops import random_bits as random
from weft.ops.dense.bias_act_dropout import dropout
from weft.ops.random_bits import keep_mask_rows, mix_key, random_bits, row_elements, uniform

CASES = [
    (0, 0, 0, 0),
    (1, 2, 3, 4),
    (-1, 5, 7, 2**31),
    (2**63 - 1, 10**9, 123, 2**32 - 1),
    (-(2**63), -1, 1000, 2**32),
    (12345, 6, 7, 2**40 + 17),
]


def torch_bits(seed: int, step: int, site: int, element: int) -> int:
    key = mix_key(torch.tensor([seed, step]), site)
    return random_bits(key, torch.tensor([element])).item()


def test_known_values():
    """Pinned: a change of these numbers changes every mask and every initial weight there is."""
    assert [bits_of(*case) for case in CASES] == [
        1312594413,
        1780993359,
        1940917519,
        669995978,
        701134562,
        3037347941,
    ]


@pytest.mark.parametrize("case", CASES)
def test_torch_equals_plain_integers(case):
    assert torch_bits(*case) == bits_of(*case)


@pytest.mark.parametrize("case", CASES)
def test_numba_equals_plain_integers(case):
    from weft.ops.cpu import random_bits as random_cpu

    seed, step, site, element = case
    key = np.uint64(random_cpu.mix_key(np.int64(seed), np.int64(step), np.int64(site)))
    assert int(key) == key_of(seed, step, site)
    for row in {element, element & 0xFFFFFFFF}:  # a row of many bits, or the upper ones as a column
        term = random_cpu.column_term(np.int64((element - row) >> 32))
        assert int(random_cpu.random_bits(random_cpu.mask_row(key, np.int64(row)), term)) == bits_of(*case)


@pytest.mark.parametrize("rate", [0.0, 2.0**-33, 2.0**-32, 0.1, 0.5, 0.9, 1 - 2.0**-24, 1.0])
def test_numba_and_torch_keep_the_same_elements(rate):
    from weft.ops import cpu

    clock, x = torch.tensor([3, 4]), torch.ones(5000)
    fraction = torch.tensor(rate)
    expected = keep_mask_rows(fraction, clock, 2, 1, x.numel())[0]
    kept = cpu.bias_act_dropout(x, None, "none", fraction, clock, 2) != 0
    assert torch.equal(kept, expected)


def test_elements_of_rows():
    elements = row_elements(3, 4)
    assert elements.tolist() == [[column * 2**32 + row for column in range(4)] for row in range(3)]
    rate, clock = torch.tensor(0.5), torch.tensor([3, 4])
    kept = keep_mask_rows(rate, clock, 2, 5000, 3)
    expected = [
        [bits_of(3, 4, 2, column * 2**32 + row) >= 2**31 for column in range(3)] for row in (0, 4095, 4096, 4999)
    ]
    assert kept[[0, 4095, 4096, 4999]].tolist() == expected


def test_every_rate_drops_its_part():
    clock = torch.stack([torch.arange(9), torch.arange(9)], 1)
    rates = torch.arange(1, 10) / 10
    kept = keep_mask_rows(rates, clock, 0, 200, 100).double().mean((1, 2))
    assert torch.allclose(kept, 1 - rates.double(), atol=0.02)


@pytest.mark.parametrize("site", [0, 1])
def test_bits_are_uniform(site):
    bits = random_bits(mix_key(torch.tensor([0, 0]), site), torch.arange(1 << 16))
    for shift in (0, 8, 16, 24):
        counts = torch.bincount((bits >> shift) & 255, minlength=256)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("other", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (2**32, 0, 0), (0, 2**32, 0)], ids=str)
def test_seed_step_and_site_give_independent_bits(other):
    """Chi-square over pairs of the top four bits of the two streams."""
    elements = torch.arange(1 << 15)
    first = random_bits(mix_key(torch.tensor([0, 0]), 0), elements) >> 28
    seed, step, site = other
    second = random_bits(mix_key(torch.tensor([seed, step]), site), elements) >> 28
    counts = torch.bincount(first * 16 + second, minlength=256)
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4


def test_neighbouring_elements_are_independent():
    bits = random_bits(mix_key(torch.tensor([5, 6]), 7), torch.arange(1 << 16)) >> 28
    for lag in (1, 2, 16, 64, 1024):
        counts = torch.bincount(bits[:-lag] * 16 + bits[lag:], minlength=256)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-4


def test_rows_and_columns_are_independent():
    """Chi-square over pairs of the top four bits of elements that are some columns or some rows apart."""
    elements = row_elements(1 << 11, 64)
    bits = random_bits(mix_key(torch.tensor([5, 6]), 7), elements) >> 28
    for rows, columns in ((0, 1), (0, 2), (0, 16), (1, 0), (2, 0), (64, 0), (1, 1), (3, 5)):
        pairs = bits[: len(bits) - rows, : 64 - columns] * 16 + bits[rows:, columns:]
        counts = torch.bincount(pairs.flatten(), minlength=256)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-4


def test_values_without_columns_have_masks_of_their_own():
    """As columns of one row, the masks of two steps would be pieces of one sequence, shifted."""
    values = torch.ones(50_000)
    masks = [dropout(values, 0.5, torch.tensor([6, step])) != 0 for step in (30, 154)]
    assert torch.equal(masks[0], keep_mask_rows(torch.tensor(0.5), torch.tensor([6, 30]), 0, 50_000, 1)[:, 0])
    runs = {tuple(row) for row in masks[0].unfold(0, 64, 1).tolist()}
    assert not any(tuple(row) in runs for row in masks[1].unfold(0, 64, 64).tolist())


def test_swapping_seed_and_step_gives_other_bits():
    assert key_of(1, 2, 3) != key_of(2, 1, 3)
    assert not torch.equal(mix_key(torch.tensor([1, 2]), 3), mix_key(torch.tensor([2, 1]), 3))


def test_uniform_does_not_depend_on_shape():
    assert torch.equal(uniform(3, 1, (4, 5)).flatten(), uniform(3, 1, (20,)))
    assert torch.equal(uniform(3, 1, (7,)), uniform(3, 1, (20,))[:7])


def test_uniform_fills_the_unit_interval():
    values = uniform(0, 0, (1 << 16,))
    assert values.dtype == torch.float32
    assert values.min() >= 0
    assert values.max() < 1
    assert stats.kstest(values.numpy(), "uniform").pvalue > 1e-4


def test_uniform_streams_and_seeds_differ():
    draws = [uniform(seed, stream, (64,)) for seed in (0, 1, 2**63, 2**64 - 1) for stream in (0, 1)]
    assert len({tuple(draw.tolist()) for draw in draws}) == len(draws)


def test_initial_weights_share_no_bits_with_masks():
    clock = torch.tensor([0, 0])
    mask = random_bits(mix_key(clock, 0), torch.arange(64)) >> 8
    assert random.INIT_STEP < 0
    assert not torch.equal(mask.float() * 2.0**-24, uniform(0, 0, (64,)))
