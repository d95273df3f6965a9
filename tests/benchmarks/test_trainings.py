"""The trainings that estimates are measured on: reproducible, complete, and models that train."""

from __future__ import annotations

import pytest
import torch

from benchmarks.baselines.trainings import (
    CONVS,
    JUMPS,
    LAYERS,
    MODULES,
    NAMES,
    NORMS,
    OPAQUE,
    QUEUES,
    SHAPES,
    Recipe,
    entries,
    opaque_module,
    queue,
    random_module,
    users_module,
)
from weft.graph.generate import citation

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def graph():
    return citation(60, 240, 6, 3, seed=1)


@pytest.mark.parametrize("name", QUEUES)
def test_a_queue_has_twenty_different_trainings_on_every_shape(name):
    found = queue(name)
    assert found == queue(name)
    assert len({(entry.shape, entry.layers) for entry in found}) == 20
    assert {entry.shape for entry in found} == set(SHAPES)
    assert all(entry.layers in LAYERS for entry in found)
    models = {entry.model for entry in found}
    assert models == (set(QUEUES) - {"mix"} if name == "mix" else {name})


def test_all_sets_together():
    found = entries(["queues", "modules", "opaque"])
    assert len(found) == 5 * 20 + MODULES + len(OPAQUE)
    assert len(entries(["modules"])) == MODULES
    assert len(entries(["users"])) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_users_modules_give_logits_and_gradients(name, graph):
    model = users_module(name, hidden=16)(6, 3)
    edges = torch.stack([graph.adj.indices.long(), graph.adj.rows().long()])
    logits = model(graph.x, edges if "transformer" in name else graph.adj)
    assert logits.shape == (60, 3)
    logits.square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_twenty_modules_have_every_part():
    recipes = [Recipe.of(seed) for seed in range(MODULES)]
    assert recipes == [Recipe.of(seed) for seed in range(MODULES)]
    assert len(set(recipes)) == MODULES
    assert {conv for recipe in recipes for conv in recipe.convs} == set(CONVS)
    assert {recipe.norm for recipe in recipes} == set(NORMS)
    assert {recipe.jump for recipe in recipes} == set(JUMPS)
    assert {recipe.skip for recipe in recipes} == {True, False}


@pytest.mark.parametrize("seed", range(MODULES))
def test_random_modules_give_logits_and_gradients(seed, graph):
    model = random_module(seed)(6, 3)
    logits = model(graph.x, graph.adj)
    assert logits.shape == (60, 3)
    logits.square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("name", list(OPAQUE))
def test_opaque_modules_are_called_the_pyg_way(name, graph):
    pytest.importorskip("torch_geometric")
    model = opaque_module(name, layers=2, hidden=8)(6, 3)
    assert model(graph.x, graph.edge_index()).shape == (60, 3)


def test_members_of_a_stack_share_their_model(graph):
    tasks = entries(["modules"])[0].tasks(graph, 3, 8)
    assert len({task.name for task in tasks}) == len({task.lr for task in tasks}) == 3
    assert len({id(task.model) for task in tasks}) == 1
