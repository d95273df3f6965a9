"""A buffer of features holds zeros behind a batch, whatever was in it before: attention gives the same bits."""

from __future__ import annotations

import pytest
import torch

from tests.ops.interpreted.packed import both_csr, numbers, small
from weft.batches import FeatureStore
from weft.batches.sampled import FeatureBuffer
from weft.ops.attention.gat_triton import attention_forward_triton

CPU, ROWS, WIDTH = torch.device("cpu"), 9, 5


def store_of(x: torch.Tensor) -> FeatureStore:
    store = FeatureStore(x)
    store.tier = "device"  # as on a GPU; the interpreter runs its kernels on CPU tensors
    return store


def read(buffer: FeatureBuffer, x: torch.Tensor, count: int, room: int = ROWS) -> torch.Tensor:
    nodes = torch.arange(room, dtype=torch.int32) % x.shape[0]
    return buffer.read(store_of(x), nodes, torch.tensor([count], dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_behind_a_batch_are_zeros(dtype):
    x, buffer = numbers(20, WIDTH, dtype=dtype), FeatureBuffer(ROWS, numbers(1, WIDTH, dtype=dtype), CPU)
    # Sizes fall, rise, and fall; the batch of four places is the last one of an epoch, which has fewer seeds.
    for count, room in [(8, ROWS), (5, ROWS), (3, 4), (4, ROWS), (9, ROWS), (2, 4), (2, 4), (6, ROWS), (0, ROWS)]:
        found = read(buffer, x, count, room)
        assert found.shape == (room, WIDTH)
        assert torch.equal(found[:count], x[:count])
        assert not found[count:].any()
    assert not buffer.rows.any()


def attended(x: torch.Tensor) -> torch.Tensor:
    """One head over rows of which the last three are padding: no edge leads to them."""
    adj = small(6, 6)
    csr, _ = both_csr(adj)
    csr_x, weight = x[:, None, :], numbers(WIDTH, seed=3)
    scores = (x * weight).sum(-1)[:, None]
    out, *_ = attention_forward_triton(csr_x, scores, scores[:6] / 2, 0.2, None, None, 6, csr, True)
    return out


def test_attention_does_not_depend_on_former_batches():
    x = numbers(6, WIDTH)
    used = FeatureBuffer(ROWS, x, CPU)
    left = read(used, 3.0 + numbers(ROWS, WIDTH, seed=8), ROWS).clone()
    after, alone = read(used, x, 6), read(FeatureBuffer(ROWS, x, CPU), x, 6)
    assert torch.equal(attended(after), attended(alone))
    left[:6] = x
    assert not torch.equal(attended(left), attended(alone))  # what a buffer that keeps its rows would give
