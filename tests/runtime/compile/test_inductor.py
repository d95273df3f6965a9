"""A step compiled by Inductor reproduces the original, or is not used."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import weft
from tests.dry_runs import default_plan
from weft.core.errors import InputError
from weft.core.task import Task
from weft.runtime import compile as compiled
from weft.runtime import group
from weft.runtime.compile import compile_stack
from weft.runtime.group import GroupRun

pytestmark = pytest.mark.filterwarnings("ignore")


class Chain(nn.Module):
    """Much between Weft's operators: activations, a norm with statistics, a residual, Weft's dropout."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.first = weft.nn.GCNConv(in_features, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dense = nn.Linear(8, 8)
        self.drop = weft.nn.Dropout(0.4)
        self.last = weft.nn.GCNConv(8, out_features)

    def forward(self, x, graph):
        h = self.norm(self.first(x, graph))
        h = F.gelu(h) + F.silu(self.dense(h))
        return self.last(self.drop(h), graph)


class Masked(nn.Module):
    """Picks edges by a mask and normalises them in every call, as PyG's layers do."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.dense = nn.Linear(in_features, out_features)

    def forward(self, x, edge_index):
        source, target = edge_index[:, edge_index[0] != edge_index[1]]
        degree = x.new_zeros(x.shape[0]).scatter_add_(0, target, torch.ones_like(target, dtype=x.dtype)).clamp_(min=1)
        h = self.dense(x)
        return h + torch.zeros_like(h).index_add_(0, target, h[source] / degree[target][:, None])


class Drawing(nn.Module):
    """Draws from torch's generator, out of sight of any clock."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.dense = nn.Linear(in_features, out_features)

    def forward(self, x, graph):
        return self.dense(x + torch.rand_like(x))


@pytest.fixture
def run_of(graph):
    return partial(make_run, graph)


def make_run(graph, model, members=1, compiled=False, **settings):
    tasks = [Task(graph=graph, model=model, seed=seed, name=str(seed), epochs=6, **settings) for seed in range(members)]
    plan = replace(default_plan(tasks, "cpu"), compiled=compiled)
    return GroupRun(tasks, graph, plan, torch.device("cpu"))


@pytest.mark.parametrize(("model", "members"), [(Chain, 3), (Masked, 1)])
def test_a_compiled_training_is_the_same_training(model, members, run_of):
    settings = {"optimizer": "sgd", "lr": 0.1}  # a bias before a norm has no gradient, of which Adam makes steps
    plain, fast = run_of(model, members, **settings), run_of(model, members, **settings)
    for stack in fast.stacks:
        compile_stack(stack, evaluated=True)
        assert stack.compiled is not None
    for _ in range(6):
        plain.step()
        fast.step()
    assert len(plain.stacks) == len(fast.stacks)
    for mine, other in zip(fast.stacks, plain.stacks, strict=True):
        for name, value in mine.state.tensors().items():
            torch.testing.assert_close(value, other.state.tensors()[name], rtol=2e-4, atol=2e-5, equal_nan=True)


def test_compiling_leaves_the_state_as_it_was(run_of):
    run = run_of(Chain)
    (stack,) = run.stacks
    before = {name: value.clone() for name, value in stack.state.tensors().items()}
    generator = torch.get_rng_state()
    compile_stack(stack, evaluated=False)
    for name, value in stack.state.tensors().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.get_rng_state(), generator)


def test_what_draws_from_torchs_generator_is_not_compiled(run_of):
    (stack,) = run_of(Drawing).stacks
    with pytest.raises(InputError, match="draws from torch's generator"):
        compile_stack(stack, evaluated=False)
    assert stack.compiled is None


def test_what_gives_other_numbers_is_not_used(monkeypatch, run_of):
    monkeypatch.setattr(compiled, "_by_inductor", lambda traced, flat: lambda flat: [t * 1.1 for t in traced(flat)])
    run = run_of(Masked, compiled=True)
    run.prepare()
    assert any("not compiled: compiled, it gives other numbers" in note for note in run.notes)
    assert run.stacks[0].compiled is None


def test_a_compiler_that_fails_costs_a_note(monkeypatch, run_of):
    def broken(traced, flat):
        raise RuntimeError("no compiler\nfurther down")

    monkeypatch.setattr(compiled, "_by_inductor", broken)
    run = run_of(Masked, compiled=True)
    run.advance(2)
    assert "the step is not compiled: RuntimeError: no compiler" in run.notes


def test_what_could_not_be_compiled_is_not_tried_again_and_told_once(monkeypatch, run_of):
    tried = []

    def refuse(stack, evaluated):
        tried.append(len(stack.tasks))
        raise InputError("no")

    monkeypatch.setattr("weft.runtime.compile.compile_stack", refuse)
    run = run_of(Masked, 3, compiled=True)
    run.advance(2)
    run.drop([1])
    run.advance(1)
    stacks = len(run.stacks)
    assert len(tried) == stacks
    assert run.notes.count("the step is not compiled: no") == 1


def test_after_members_have_left_the_step_is_compiled_again(monkeypatch, run_of):
    made = []
    monkeypatch.setattr(compiled, "_by_inductor", lambda traced, flat: made.append(flat.shape) or traced)
    run = run_of(Masked, 3, compiled=True)
    run.advance(2)
    run.drop([1])
    run.advance(1)
    assert [shape[0] for shape in made] == [3, 3, 2, 2]  # each to differentiate and to evaluate


def test_what_is_compiled_and_does_not_fit_trains_as_it_was_written(monkeypatch, run_of):
    tried = []

    def record(run, *kinds):
        tried.append(run.stacks[0].compiled is not None)
        if tried[-1]:
            raise torch.OutOfMemoryError
        as_it_is(run, *kinds)

    as_it_is = group.GroupRun._record
    monkeypatch.setattr(compiled, "_by_inductor", lambda traced, flat: traced)
    monkeypatch.setattr(group.GroupRun, "_record", record)
    run = run_of(Masked, compiled=True)
    run.advance(2)
    assert tried == [True, False]
    assert run.notes == ["the step is not compiled: memory ran out"]


def test_clusters_are_found_on_a_graph_of_the_runs_own(run_of):
    run = run_of(Masked)
    ordered = group.clustered(run.graph, run.notes)
    assert "clusters" in ordered.adj.nodes
    assert "clusters" not in run.graph.adj.nodes, "the user's graph is as it was"
    assert ordered.x is run.graph.x


def test_clusters_that_cannot_be_found_for_want_of_memory_cost_a_note(monkeypatch, run_of):
    def too_much(adj):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(group, "ordered_rows", too_much)
    run, notes = run_of(Masked), []
    assert group.clustered(run.graph, notes) is run.graph
    assert notes == ["rows by length: the memory was not enough to find clusters"]


def test_a_small_parameter_that_is_wrong_is_noticed_beside_large_ones(monkeypatch, run_of):
    """Relative to the whole gradient it would be a trifle."""

    def wrong(traced, flat):
        def call(flat):
            losses, grads = traced(flat)
            return losses, torch.cat([grads[:, :-1], torch.zeros_like(grads[:, -1:])], 1)

        return call

    monkeypatch.setattr(compiled, "_by_inductor", wrong)
    (stack,) = run_of(Scaled).stacks
    with pytest.raises(InputError, match="gives other numbers"):
        compile_stack(stack, evaluated=False)


class Scaled(nn.Module):
    """Its last parameter has a gradient of a hundredth of the others'."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.dense, self.shift = nn.Linear(in_features, out_features), nn.Parameter(torch.ones(1))

    def forward(self, x, graph):
        weights = torch.linspace(0.01, 0.02, self.dense.out_features)
        return self.dense(x) + self.shift * weights
