"""Dropout as users write it: the same masks alone, stacked, resumed; torch's own if a pass will be recomputed."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import weft
from tests.dry_runs import default_plan
from weft.core.task import Task
from weft.runtime.group import GroupRun
from weft.runtime.modules.layers import CountedDropout

CLOCK = torch.tensor([7, 3])


class Plain(nn.Module):
    """``nn.Dropout``, ``F.dropout`` and one of Weft's, on rows, on numbers and on heads."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.first, self.last = weft.nn.GCNConv(in_features, 8), weft.nn.GCNConv(8, out_features)
        self.drop, self.own = nn.Dropout(0.5), weft.nn.Dropout(0.3)

    def forward(self, x, graph):
        h = self.own(self.drop(torch.relu(self.first(x, graph))))
        h = F.dropout(h.view(-1, 2, 4), 0.2, training=self.training).reshape(-1, 8)
        return self.last(h, graph)


def dropped(clock, x, site=2, calls=1):
    with CountedDropout(clock, site):
        return [F.dropout(x, 0.5) for _ in range(calls)]


@pytest.mark.parametrize("shape", [(), (6,), (5, 4), (5, 2, 3), (0, 3)])
def test_any_shape_keeps_some_and_scales_them(shape):
    (y,) = dropped(CLOCK, torch.ones(shape))
    assert y.shape == torch.Size(shape)
    assert set(y.unique().tolist()) <= {0.0, 2.0}


def test_every_call_seed_and_step_has_a_mask_of_its_own():
    x = torch.ones(40, 8)
    first, second = dropped(CLOCK, x, calls=2)
    masks = [first, second, *dropped(torch.tensor([8, 3]), x), *dropped(torch.tensor([7, 4]), x)]
    assert not any(torch.equal(a, b) for place, a in enumerate(masks) for b in masks[place + 1 :])
    assert all(0.35 < float((mask == 0).float().mean()) < 0.65 for mask in masks)
    assert torch.equal(first, dropped(CLOCK, x)[0])


def test_under_vmap_a_member_has_the_mask_it_has_alone():
    clocks, x = torch.tensor([[7, 3], [9, 1]]), torch.ones(2, 6, 4)
    together = torch.vmap(lambda clock, x: dropped(clock, x)[0])(clocks, x)
    assert torch.equal(together[1], dropped(clocks[1], x[1])[0])


def test_torch_keeps_what_is_not_dropout_in_training():
    x = torch.ones(6, 4)
    with CountedDropout(CLOCK, 0):
        assert F.dropout(x, 0.5, training=False) is x or torch.equal(F.dropout(x, 0.5, training=False), x)
        assert torch.equal(F.dropout(x, 0.0), x)
        assert not F.dropout(x, 1.0).any()
        y = x.clone()
        assert F.dropout(y, 0.5, inplace=True) is y


def test_a_pass_that_is_repeated_has_torchs_masks_both_times():
    """Otherwise the gradient would be that of another mask than the result's."""
    x = torch.ones(50, 4, requires_grad=True)
    with CountedDropout(CLOCK, 0):
        y = checkpoint(lambda x: F.dropout(x, 0.5), x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(y.detach(), x.grad)


class Recomputed(torch.autograd.Function):
    """Keeps its input alone and runs again in the backward pass, as reversible networks do."""

    @staticmethod
    def forward(ctx, x):
        ctx.random = torch.get_rng_state()
        ctx.save_for_backward(x)
        return F.dropout(x, 0.5)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(), torch.enable_grad():
            torch.set_rng_state(ctx.random)
            return torch.autograd.grad(F.dropout(x, 0.5), x, grad)[0]


def checkpointed(x):
    return checkpoint(lambda x: F.dropout(x, 0.5), x, use_reentrant=True)


@pytest.mark.parametrize("again", [Recomputed.apply, checkpointed])
def test_so_has_one_that_runs_without_gradients_first(again):
    x = torch.ones(50, 4, requires_grad=True)
    with CountedDropout(CLOCK, 0):
        y = again(x)
    y.sum().backward()
    assert torch.equal(y.detach(), x.grad)


def test_its_gradient_can_be_differentiated():
    x = torch.linspace(1.0, 2.0, 40).view(10, 4).requires_grad_()
    with CountedDropout(CLOCK, 0):
        y = F.dropout(x**2, 0.5)
    scale = torch.where(y.detach() > 0, 2.0, 0.0)
    (grad,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(second, 12 * scale**2 * x.detach() ** 2)


def test_other_derivatives_are_torchs():
    x = torch.ones(40, 4)
    with CountedDropout(CLOCK, 0):
        assert set(torch.func.grad(lambda x: F.dropout(x, 0.5).sum())(x).unique().tolist()) == {0.0, 2.0}
        value, slope = torch.func.jvp(lambda x: F.dropout(x, 0.5), (x,), (x,))
    assert torch.equal(value, slope)


def test_a_tensor_elsewhere_than_the_clock_is_torchs():
    (y,) = dropped(CLOCK.to("meta"), torch.ones(40, 4))
    assert set(y.unique().tolist()) == {0.0, 2.0}


def test_a_rate_that_is_a_tensor_is_torchs():
    with CountedDropout(CLOCK, 0), pytest.raises(TypeError, match="must be float"):
        F.dropout(torch.ones(4, 4), torch.tensor([0.5]))


def run_of(graph, seeds):
    tasks = [Task(graph=graph, model=Plain, seed=seed, name=str(seed), epochs=5, optimizer="sgd") for seed in seeds]
    return GroupRun(tasks, graph, default_plan(tasks, "cpu"), torch.device("cpu"))


def test_modules_with_torchs_dropout_stack_and_members_are_as_alone(graph):
    together = run_of(graph, (1, 2, 3))
    assert len(together.stacks) == 1
    assert not together.notes
    together.advance(5)
    for place, seed in enumerate((1, 2, 3)):
        alone = run_of(graph, (seed,))
        alone.advance(5)
        for name in ("flat", "history"):
            mine, other = together.members[place].tensor(name), alone.members[0].tensor(name)
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6, equal_nan=True)


def test_a_training_does_not_touch_torchs_generator(graph):
    before = torch.get_rng_state()
    run = run_of(graph, (1,))
    state = torch.get_rng_state()
    run.advance(3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(before)


class Chosen(nn.Module):
    """What is not trained comes from the seed."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.dense = nn.Linear(in_features, out_features)
        self.choose(in_features)

    def choose(self, in_features):
        self.drop = nn.Dropout(float(torch.rand(())))

    def forward(self, x, graph):
        return self.drop(self.dense(x))


class Projected(Chosen):
    def choose(self, in_features):
        self.basis = torch.randn(in_features, in_features)

    def forward(self, x, graph):
        return self.dense(x @ self.basis)


@pytest.mark.parametrize(("model", "name"), [(Chosen, "drop.p"), (Projected, "basis")])
def test_members_whose_seeds_chose_other_numbers_train_apart(model, name, graph):
    tasks = [Task(graph=graph, model=model, seed=seed, name=str(seed), epochs=3) for seed in range(3)]
    together = GroupRun(tasks, graph, default_plan(tasks, "cpu"), torch.device("cpu"))
    assert len(together.stacks) == 3
    assert f"their modules differ in '{name}'" in together.notes[0]
