"""Norms against torch's own, with and without the bias of the layer before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

from weft.core.errors import InputError
from weft.nn import BatchNorm, Epilogue, LayerNorm
from weft.nn import epilogue as norm_module


def pair() -> tuple[BatchNorm, nn.BatchNorm1d]:
    ours, theirs = BatchNorm(5), nn.BatchNorm1d(5)
    for norm in (ours, theirs):
        norm.weight.data = torch.linspace(0.5, 2, 5)
        norm.bias.data = torch.linspace(-1, 1, 5)
    return ours, theirs


def test_batch_norm_with_a_bias_equals_adding_it_first() -> None:
    ours, theirs = pair()
    b = torch.randn(5, requires_grad=True)
    for step in range(4):
        x = torch.randn(11, 5) * (step + 1)
        mine, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
        out, expected = ours(mine, b), theirs(reference + b.detach())
        torch.testing.assert_close(out, expected)
        out.square().sum().backward(), expected.square().sum().backward()
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    assert torch.equal(b.grad, torch.zeros(5))
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(x, b), theirs(x + b))


def test_batch_norm_gives_the_bias_its_gradient_in_evaluation() -> None:
    ours, theirs = pair()
    ours.eval(), theirs.eval()
    x, b, c = torch.randn(11, 5), torch.zeros(5, requires_grad=True), torch.zeros(5, requires_grad=True)
    ours(x, b).square().sum().backward(), theirs(x + c).square().sum().backward()
    torch.testing.assert_close(b.grad, c.grad)


def test_batch_norm_updates_the_buffers_it_is_given() -> None:
    norm = BatchNorm(5)
    buffers = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    functional_call(norm, (dict(norm.named_parameters()), buffers), (torch.randn(11, 5), torch.ones(5)))
    assert not torch.equal(buffers["running_mean"], norm.running_mean)
    assert not torch.equal(buffers["running_var"], norm.running_var)
    assert torch.equal(norm.running_mean, torch.zeros(5))


def test_batch_norm_may_run_twice_before_a_backward_pass() -> None:
    norm, b = BatchNorm(5), torch.randn(5, requires_grad=True)
    x = torch.randn(11, 5, requires_grad=True)
    (norm(x, b).square().sum() + norm(2 * x, b).square().sum()).backward()
    assert x.grad is not None


@pytest.mark.parametrize("mode", ["node", "graph"])
def test_layer_norm(mode: str) -> None:
    ours = LayerNorm(5, mode=mode)
    ours.weight.data, ours.bias.data = torch.linspace(0.5, 2, 5), torch.linspace(-1, 1, 5)
    x, b = torch.randn(11, 5), torch.randn(5)
    y = x + b
    over = {"dim": -1, "keepdim": True} if mode == "node" else {}
    deviation = (y.var(unbiased=False, **over) + 1e-5).sqrt()
    expected = (y - y.mean(**over)) / deviation * ours.weight + ours.bias
    torch.testing.assert_close(ours(x, b), expected, rtol=1e-4, atol=1e-4)


def test_layer_norm_over_a_graph_of_tiny_values_is_that_of_pyg() -> None:
    """PyG adds epsilon to the deviation, not to the variance: values of 1e-3 tell the two apart."""
    pyg = pytest.importorskip("torch_geometric.nn")
    x = torch.randn(11, 5) * 1e-3
    torch.testing.assert_close(LayerNorm(5, mode="graph")(x), pyg.LayerNorm(5, mode="graph")(x), rtol=1e-4, atol=1e-5)


def test_reduced_precision_keeps_float_statistics() -> None:
    norm = BatchNorm(5)
    weights = {name: p.detach().bfloat16() for name, p in norm.named_parameters()}
    x = torch.randn(40, 5).bfloat16()
    out = functional_call(norm, weights, (x, torch.ones(5).bfloat16()))
    assert out.dtype == torch.bfloat16
    assert norm.running_mean.dtype == torch.float32
    expected = copy.deepcopy(norm)(x.float())
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)


class TestInOneOperator:
    """The way of a GPU, by the operators' references: the whole epilogue is handed to the norm."""

    @staticmethod
    def both(monkeypatch: pytest.MonkeyPatch, *options: object) -> tuple[Epilogue, Epilogue, list]:
        """An epilogue as it is, one that goes a GPU's way, and a list of that one's calls of ``bias_act_dropout``."""
        passes: list = []
        plain = norm_module.Then.__call__
        monkeypatch.setattr(norm_module.Then, "__call__", lambda *a: passes.append(a) or plain(*a))
        here = Epilogue(6, *options)
        here.dropout.clock = torch.tensor([3, 4])
        here.norm.weight.data, here.norm.bias.data = torch.linspace(0.5, 2, 6), torch.linspace(-1, 1, 6)
        return here, copy.deepcopy(here), passes

    @pytest.mark.parametrize("parts", [1, 2])
    @pytest.mark.parametrize("activation", ["none", "relu", "elu"])
    @pytest.mark.parametrize("norm", ["batch", "layer"])
    @pytest.mark.parametrize("with_b", [False, True])
    def test_outputs_gradients_and_statistics(self, monkeypatch, with_b, norm, activation, parts) -> None:
        here, there, passes = self.both(monkeypatch, norm, activation, 0.4)
        x, b, grad = torch.randn(11, 6), torch.randn(6), torch.randn(11, 6)
        for training in (True, True, False):
            results = []
            for epilogue, gpu in ((here, False), (there, True)):
                monkeypatch.setattr(norm_module, "on_gpu", lambda tensor, gpu=gpu: gpu)
                passes.clear()
                leaves = [value.clone().requires_grad_() for value in ((x, b) if with_b else (x,))]
                out = epilogue.train(training)(leaves[0], leaves[1] if with_b else None, parts)
                wanted = [*leaves, epilogue.norm.weight, epilogue.norm.bias]
                results.append((out, *torch.autograd.grad(out, wanted, grad)))
                assert len(passes) == (0 if gpu and (training or norm == "layer") else 1)
            for mine, theirs in zip(*reversed(results), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(there.norm.buffers(), here.norm.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs)

    @pytest.mark.parametrize("norm", ["batch", "layer"])
    def test_evaluation_without_gradients(self, monkeypatch, norm) -> None:
        here, there, passes = self.both(monkeypatch, norm, "elu", 0.4)
        x, b = torch.randn(11, 6), torch.randn(6)
        with torch.no_grad():
            expected = here.eval()(x, b)
            monkeypatch.setattr(norm_module, "on_gpu", lambda tensor: True)
            passes.clear()
            torch.testing.assert_close(there.eval()(x, b), expected)
        assert not passes

    @pytest.mark.parametrize("norm", ["batch", "layer"])
    def test_mapped_over_tasks(self, monkeypatch, norm) -> None:
        monkeypatch.setattr(norm_module, "on_gpu", lambda tensor: True)
        epilogue = Epilogue(6, norm, "relu", 0.4)
        x, weights, clocks = torch.randn(3, 11, 6), torch.randn(3, 6), torch.tensor([[1, 2], [3, 4], [5, 6]])
        kept = {name: torch.stack([value] * 3) for name, value in epilogue.norm.named_buffers()}

        def one(x, weight, clock, buffers):
            named = {"norm.weight": weight, "dropout.clock": clock} | {f"norm.{k}": v for k, v in buffers.items()}
            return functional_call(epilogue, named, (x,))

        out = torch.vmap(one)(x, weights, clocks, kept)
        for t in range(3):
            own = {name: value.clone() for name, value in epilogue.norm.named_buffers()}
            torch.testing.assert_close(out[t], one(x[t], weights[t], clocks[t], own))
            assert all(torch.allclose(kept[name][t], value) for name, value in own.items())

    def test_wide_layer_norms_and_norms_over_the_graph_are_torchs(self, monkeypatch) -> None:
        x = torch.randn(3, 1030)
        norms = LayerNorm(1030), LayerNorm(1030, mode="graph")
        expected = [norm(x) for norm in norms]
        monkeypatch.setattr(norm_module, "on_gpu", lambda tensor: True)
        assert all(torch.equal(norm(x), before) for norm, before in zip(norms, expected, strict=True))


@pytest.mark.parametrize("rows", [0, 1])
def test_a_batch_norm_refuses_to_train_on_less_than_two_nodes(rows) -> None:
    with pytest.raises(InputError, match=f"x has {rows} nodes"):
        BatchNorm(3)(torch.ones(rows, 3))
