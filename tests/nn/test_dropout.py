"""Dropout: the clock decides the mask, what is kept, and nothing is dropped in evaluation."""

from __future__ import annotations

import pytest
import torch

from weft import ops
from weft.core.errors import SpecError
from weft.nn import Dropout, Epilogue


def test_clock_gives_the_operators_mask() -> None:
    layer = Dropout(0.3)
    layer.site = 5
    layer.clock = torch.tensor([7, 2])
    x = torch.randn(20, 6)
    assert torch.equal(layer(x), ops.dropout(x, 0.3, torch.tensor([7, 2]), 5))


def test_kept_elements_are_scaled() -> None:
    x = torch.ones(200, 50)
    y = Dropout(0.4)(x)
    kept = y != 0
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / 0.6))
    assert kept.float().mean().item() == pytest.approx(0.6, abs=0.02)


@pytest.mark.parametrize("layer", [Dropout(0.5).eval(), Dropout(0.0)])
def test_nothing_is_dropped(layer: Dropout) -> None:
    x = torch.randn(4, 3)
    assert layer(x) is x


def test_every_call_is_fresh_without_a_clock() -> None:
    layer, x = Dropout(0.5), torch.ones(50, 50)
    assert not torch.equal(layer(x), layer(x))


def test_rate_stays_exact_in_reduced_precision() -> None:
    layer = Dropout(0.6).bfloat16().half()
    assert layer.rate.dtype == torch.float32
    assert float(layer.rate) == pytest.approx(0.6, abs=1e-7)


@pytest.mark.parametrize("p", [1.0, -0.1, float("nan"), "half", True])
def test_bad_rates_are_named(p) -> None:
    with pytest.raises(SpecError, match="dropout="):
        Dropout(p)


@pytest.mark.parametrize("activation", ["relu", "elu", "none"])
@pytest.mark.parametrize("norm", [None, "batch", "layer"])
def test_epilogue_is_dropout_of_activation_of_norm(activation: str, norm: str | None) -> None:
    epilogue = Epilogue(6, norm, activation, dropout=0.3)
    epilogue.dropout.clock = torch.tensor([1, 2])
    plain = Epilogue(6, norm, "none")
    x, b = torch.randn(9, 6), torch.randn(6)
    act = {"relu": torch.relu, "elu": torch.nn.functional.elu, "none": lambda v: v}[activation]
    expected = ops.dropout(act(plain(x + b)), 0.3, torch.tensor([1, 2]))
    torch.testing.assert_close(epilogue(x, b), expected)


def test_unknown_activation_has_a_hint() -> None:
    with pytest.raises(SpecError, match="did you mean 'relu'"):
        Epilogue(6, activation="rleu")
