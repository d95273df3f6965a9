"""Norms with what follows them on a GPU: outputs and gradients against torch in float64, stacked as alone."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.nn.functional import elu, relu

from tests.ops.comparing import assert_agrees, assert_near, value_and_gradients
from weft.nn import BatchNorm, Epilogue
from weft.ops.dense.batch_norm import batch_norm_act_dropout
from weft.ops.dense.layer_norm import layer_norm_act_dropout
from weft.ops.random_bits import keep_mask_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ACTIVATE = {"none": lambda x: x, "relu": relu, "elu": elu}
F32, BF16 = torch.float32, torch.bfloat16
ROWS = 20_001
CASES = [  # leading dimensions, rows, width, activation, rate, type
    ((), 2001, 64, "relu", 0.5, F32),  # few: among many, one is so near zero that rounding decides on which side
    ((3,), ROWS, 17, "elu", 0.5, F32),
    ((3,), ROWS, 130, "elu", 0.0, BF16),
    ((), ROWS, 1024, "none", 0.5, BF16),
]


def make(*shape: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64).to("cuda")


def clocks(*lead: int) -> torch.Tensor:
    return torch.arange(2 * torch.Size(lead).numel(), device="cuda").reshape(*lead, 2)


def ended(out, act, rate, clock):
    out = ACTIVATE[act](out)
    if not rate:
        return out
    rates = torch.full(clock.shape[:-1], rate, device="cuda")
    return out * keep_mask_rows(rates, clock, 5, *out.shape[-2:]) / (1 - rate)


def plain_batch(x, weight, bias):
    if x.dim() == 2:
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, 1e-5)
    return torch.stack([plain_batch(*parts) for parts in zip(x, weight, bias, strict=True)])


def plain_layer(x, weight, shift, b):
    value = F.layer_norm(x + b.unsqueeze(-2), x.shape[-1:], eps=1e-5)
    return value * weight.unsqueeze(-2) + shift.unsqueeze(-2)


def columns(lead, width, count):
    return [make(*lead, width, seed=seed) for seed in range(1, count + 1)]


@pytest.mark.parametrize(("lead", "rows", "width", "act", "rate", "dtype"), CASES)
def test_batch_norm(lead, rows, width, act, rate, dtype):
    given, clock = [make(*lead, rows, width) + 1, *columns(lead, width, 2)], clocks(*lead)
    assert_agrees(
        lambda *a: batch_norm_act_dropout(*a, 1e-5, act, rate, clock, 5)[0],
        lambda *a: ended(plain_batch(*a), act, rate, clock), given, dtype, 1e-4 if dtype == F32 else None,
    )  # fmt: skip


@pytest.mark.parametrize(("lead", "rows", "width", "act", "rate", "dtype"), CASES)
def test_layer_norm(lead, rows, width, act, rate, dtype):
    given, clock = [make(*lead, rows, width) + 1, *columns(lead, width, 3)], clocks(*lead)
    assert_agrees(
        lambda x, w, s, b: layer_norm_act_dropout(x, b, w, s, 1e-5, act, rate, clock, 5),
        lambda *a: ended(plain_layer(*a), act, rate, clock), given, dtype, 1e-4 if dtype == F32 else None,
    )  # fmt: skip


def test_tasks_have_the_bits_they_have_alone_and_every_time():
    given, clock, rates = [make(3, ROWS, 64).float(), *(v.float() for v in columns((3,), 64, 3))], clocks(3), 0.5
    for function, inputs in (
        (lambda x, w, s, c: batch_norm_act_dropout(x, w, s, 1e-5, "relu", rates, c, 5)[0], given[:3]),
        (lambda x, w, s, b, c: layer_norm_act_dropout(x, b, w, s, 1e-5, "relu", rates, c, 5), given),
    ):
        grad = make(3, ROWS, 64, seed=9).float()
        out, grads = value_and_gradients(lambda *a: function(*a, clock), inputs, grad)  # noqa: B023
        again, again_grads = value_and_gradients(lambda *a: function(*a, clock), inputs, grad)  # noqa: B023
        assert all(map(torch.equal, (out, *grads), (again, *again_grads)))
        for t in range(3):
            one = [value[t] for value in inputs]
            alone, alone_grads = value_and_gradients(lambda *a: function(*a, clock[t]), one, grad[t])  # noqa: B023
            assert all(map(torch.equal, (alone, *alone_grads), (value[t] for value in (out, *grads))))


def test_moments_where_the_mean_is_large():
    x = (1e-2 * make(100_003, 33) + 1e4).float()
    _, mean, var = batch_norm_act_dropout(x, torch.ones(33, device="cuda"), torch.zeros(33, device="cuda"))
    assert_near(mean / 1e4, x.double().mean(0) / 1e4, 1e-6)
    assert_near(1e4 * var, 1e4 * x.double().var(0, correction=0), 1e-4)


def test_statistics_take_little_memory():
    """Torch's own take several times the input."""
    x, ones = make(4, ROWS, 128).float(), torch.ones(4, 128, device="cuda")
    batch_norm_act_dropout(x, ones, ones)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    batch_norm_act_dropout(x, ones, ones)
    assert torch.cuda.max_memory_allocated() - before < 1.2 * x.numel() * x.element_size()


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_epilogue_is_that_of_the_cpu(norm):
    here, there = Epilogue(48, norm, "elu", dropout=0.5), Epilogue(48, norm, "elu", dropout=0.5).cuda()
    x, b, grad = make(ROWS, 48).float(), make(48, seed=1).float(), make(ROWS, 48, seed=2).float()
    for epilogue in (here, there):
        epilogue.dropout.clock = torch.tensor([3, 4], device=epilogue.norm.weight.device)
    for training in (True, False):
        here.train(training), there.train(training)
        out, grads = value_and_gradients(here, [x.cpu(), b.cpu()], grad.cpu())
        mine, mine_grads = value_and_gradients(there, [x, b], grad)
        assert_near(mine, out, 1e-5)
        for one, other in zip(mine_grads, grads, strict=True):
            assert_near(one, other, 1e-4)
        with torch.no_grad():
            assert_near(there(x, b), here(x.cpu(), b.cpu()), 1e-5)
    if isinstance(here.norm, BatchNorm):
        assert_near(there.norm.running_mean, here.norm.running_mean, 1e-5)
        assert_near(there.norm.running_var, here.norm.running_var, 1e-5)
