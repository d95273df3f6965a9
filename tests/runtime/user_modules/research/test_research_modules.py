"""Modules as papers have them: alone, stacked, resumed and loaded they are a plain loop of torch."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import weft
from tests.runtime.user_modules.kept.test_kept_reads import check
from tests.runtime.user_modules.research.modules import ALL, random_draws
from tests.runtime.user_modules.test_exact import EPOCHS, GRAPH, RATE, preempted_after, run, seed_all, tasks_of

NOT_PLAIN = (random_draws.DropEdgeGen,)  # with a generator of its own
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's on old norms and sparse tensors


def called(module):
    """Logits and the loss of its own."""
    edges = "edge_index" in inspect.signature(module.forward).parameters
    out = module(GRAPH.x, GRAPH.edge_index() if edges else GRAPH.adj)
    return out if isinstance(out, tuple) else (out, 0.0)


def plain(model, seed=0):
    """Losses and evaluations of the loop that a user would write."""
    seed_all(seed)
    module, losses, evaluations = model(6, 3), [], []
    if any(nn.parameter.is_lazy(p) for p in module.parameters()):
        with torch.no_grad():
            called(module.eval())
    update = torch.optim.Adam(module.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        module.train()
        update.zero_grad()
        logits, extra = called(module)
        loss = F.cross_entropy(logits[GRAPH.train], GRAPH.y[GRAPH.train]) + extra
        loss.backward()
        update.step()
        losses.append(loss.item())
        module.eval()
        with torch.no_grad():
            evaluations.append(called(module)[0].clone())
    return losses, evaluations


@pytest.mark.parametrize("model", ALL)
def test_alone_loaded_and_resumed_is_a_plain_loop(model, tmp_path, monkeypatch):
    (task,) = tasks_of(model, [0])
    result, expected = run(task, out=tmp_path / "run"), plain(model)
    check(result, *expected)
    seed_all(5)
    loaded = weft.read(tmp_path / "run", model=model, graph=GRAPH)
    check(result, *expected, loaded.predict_logits(GRAPH))
    preempted_after(6, task, tmp_path / "again", monkeypatch)
    monkeypatch.undo()
    seed_all(5)
    if model in NOT_PLAIN:
        with pytest.raises(weft.SpecError, match="cannot be resumed: return it from get_extra_state"):
            run(task, out=tmp_path / "again", resume=True)
        return
    check(run(task, out=tmp_path / "again", resume=True), *expected)


@pytest.mark.parametrize("model", ALL)
def test_several_seeds_are_plain_loops(model):
    for seed, result in enumerate(run(tasks_of(model, range(3)))):
        check(result, *plain(model, seed))
