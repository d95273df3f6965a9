"""Checkpoints hold members at their true size: a padded one goes on alone, or in a group of other widths."""

from __future__ import annotations

import pytest
import torch

from tests.graphs_for_tests import tiny_graph
from tests.stacks import best_tensors, start, tasks_of

MEMBERS = ({"hidden": 8, "epochs": 9}, {"hidden": 4, "lr": 0.1}, {"hidden": 4, "seed": 2, "heads": 2})
SETTINGS = (
    {"model": "gcn", "ema": 0.9},
    {"model": "sage", "norm": "batch"},
    {"model": "gat"},
    {"model": "gin", "optimizer": "sgd", "momentum": 0.9},
    {"model": "gcn", "norm": "batch", "keep_top": 2},
)
DEVICES = ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
])]  # fmt: skip


def taken(saved, members):
    """The part of a checkpoint that is of ``members`` (places), as a checkpoint of their own."""
    found = {name: value for name, value in saved.items() if not name.partition(".")[0].isdigit()}
    found["present"] = saved["present"][list(members)]
    for place, member in enumerate(members):
        own = {name: value for name, value in saved.items() if name.startswith(f"{member}.")}
        found |= {f"{place}.{name.partition('.')[2]}": value for name, value in own.items()}
    return {name: value.detach().cpu().clone() for name, value in found.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("members", [(1,), (0,), (1, 2), (2, 1)], ids=str)
def test_members_go_on_in_other_groups(device, settings, members):
    graph = tiny_graph(sparse=True).to(device)
    tasks = tasks_of(graph, MEMBERS, **{"epochs": 6, "weight_decay": 0.01, **settings})
    together = start(tasks, graph, device)
    together.advance(3)
    others = start([tasks[member] for member in members], graph, device)
    others.restore(taken(together.tensors(), members))
    together.advance(3)
    others.advance(3)
    for place, member in enumerate(members):
        found, expected = best_tensors(others, place), best_tensors(together, member)
        assert {name: value.shape for name, value in found.items()} == {n: v.shape for n, v in expected.items()}
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_was_saved_padded_is_taken_too(device, settings):
    """As earlier versions wrote it; a group of the same widths goes on to the bit."""
    graph = tiny_graph(sparse=True).to(device)
    tasks = tasks_of(graph, MEMBERS, **{"epochs": 6, **settings})
    one, two = (start(tasks, graph, device) for _ in range(2))
    one.advance(3)
    saved = one.tensors()
    for member in one.members:
        for name in member.stack.state.tensors():
            if name == "history" or name.startswith(("buffer.", "best_buffer.")):
                saved[f"{member.index}.{name}"] = member.tensor(name)
    two.restore({name: value.detach().cpu().clone() for name, value in saved.items()})
    one.advance(3)
    two.advance(3)
    for place in range(len(tasks)):
        mine, theirs = best_tensors(one, place), best_tensors(two, place)
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
