"""What depends on the graph alone is folded, and nothing else is."""

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from weft.runtime.compile import NAME, fold_constants

EDGES = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 2]])


def folded(function, changing=(), flat=None):
    flat = torch.arange(6.0).view(2, 3) if flat is None else flat
    traced = make_fx(function, tracing_mode="real")(flat)
    return fold_constants(traced, changing), flat


def calls(module):
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def test_a_mask_over_the_edges_is_gone_and_its_size_is_fixed():
    def function(flat):
        kept = EDGES[:, EDGES[0] != EDGES[1]]
        return flat.sum() * kept.sum()

    module, flat = folded(function)
    assert torch.ops.aten.index.Tensor not in calls(module)
    assert torch.equal(module(flat), function(flat))
    assert torch.equal(module(flat + 1), function(flat + 1))


def test_what_a_state_holds_is_read_anew():
    clock = torch.ones(3)

    def function(flat):
        return flat * (clock * 2)

    module, flat = folded(function, changing=[clock])
    clock.add_(5)
    assert torch.equal(module(flat), flat * 12)


def test_without_the_state_named_it_would_be_folded():
    """That the test above can fail."""
    clock = torch.ones(3)
    module, flat = folded(lambda flat: flat * (clock * 2))
    clock.add_(5)
    assert torch.equal(module(flat), flat * 2)


def test_a_fresh_tensor_that_something_varying_is_added_to_is_made_in_every_call():
    def function(flat):
        total = torch.zeros(3, 3)
        total.index_add_(0, EDGES[1][:2], flat)
        return total

    module, flat = folded(function)
    first = module(flat).clone()
    assert torch.equal(module(flat), first)
    assert torch.equal(first, function(flat))


def test_a_view_of_it_counts_as_well():
    def function(flat):
        total = torch.zeros(9)
        total.view(3, 3)[:2].add_(flat)
        return total.clone()

    module, flat = folded(function)
    module(flat)
    assert torch.equal(module(flat), function(flat))


def test_a_constant_that_is_changed_after_it_was_read_is_not_changed_before():
    def function(flat):
        ones = torch.ones(3)
        seen = flat * ones
        ones.add_(1)
        return seen + ones

    module, flat = folded(function)
    assert torch.equal(module(flat), flat + 2)


def test_constants_in_place_are_worked_out_in_their_order():
    def function(flat):
        degree = torch.zeros(3).scatter_add_(0, EDGES[1], torch.ones(4))
        return flat * degree.clamp_(min=1).pow_(-0.5)

    module, flat = folded(function)
    assert calls(module) == [torch.ops.aten.mul.Tensor]
    assert torch.equal(module(flat), function(flat))


def test_numbers_drawn_are_drawn_anew():
    module, flat = folded(lambda flat: flat + torch.rand(3))
    assert not torch.equal(module(flat), module(flat))


def test_results_are_attributes_that_move_with_the_module():
    module, _ = folded(lambda flat: flat * EDGES.float().mean())
    assert [name for name, _ in module.named_buffers() if name.startswith(NAME)]


def test_a_counter_goes_on_counting():
    """It was there before the step, and the step writes to it, by whatever name."""
    counter = torch.zeros(2)
    seen = counter[:1]

    def function(flat):
        counter.add_(1)
        return flat * seen

    module, flat = folded(function)
    before = counter.clone()
    assert torch.equal(module(flat), flat * (before[0] + 1))
    assert torch.equal(module(flat), flat * (before[0] + 2))
