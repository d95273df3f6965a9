"""Modules that keep something: alone, stacked, resumed and loaded they are a plain loop of torch, or it is said."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import weft
from tests.runtime.user_modules.kept.modules import (
    ALL,
    buffers,
    containers,
    evaluation_only,
    made_in_call,
    outside,
    python_objects,
    tables_and_banks,
    teachers,
    weight_memory,
    wrapped_layers,
)
from tests.runtime.user_modules.odd_modules import Base
from tests.runtime.user_modules.test_exact import EPOCHS, GRAPH, RATE, preempted_after, run, seed_all, tasks_of

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's on modules of torch.jit, old norms and sparse tensors
OUTSIDE = {
    outside.GlobalInEvaluation: "SEEN",
    outside.ByModule: "BY_MODULE",
    outside.MutableDefault: "memory",
    outside.made_in_function: "calls",
}
REFUSED = (weight_memory.TiedByData, buffers.ViewsOfBuffers, *OUTSIDE)
NOT_RESUMED = (python_objects.ItertoolsCount,) if sys.version_info >= (3, 14) else ()  # which does not say where it is
EXACT = [model for model in ALL if model not in REFUSED]


def plain(model, seed=0):
    """Losses and evaluations of the loop that a user would write."""
    seed_all(seed)
    module, losses, evaluations = model(6, 3), [], []
    if any(nn.parameter.is_lazy(p) for p in module.parameters()):
        with torch.no_grad():
            module.eval()(GRAPH.x, GRAPH.adj)
    update = torch.optim.Adam(module.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        module.train()
        update.zero_grad()
        loss = F.cross_entropy(module(GRAPH.x, GRAPH.adj)[GRAPH.train], GRAPH.y[GRAPH.train])
        loss.backward()
        update.step()
        losses.append(loss.item())
        module.eval()
        with torch.no_grad():
            evaluations.append(module(GRAPH.x, GRAPH.adj).clone())
    return losses, evaluations


def check(result, losses, evaluations, logits=None):
    """The result is the loop's, and predicts what that gave at the best epoch."""
    assert result.status == "finished", result.message
    assert result.history["loss"] == pytest.approx(losses, rel=2e-4, abs=2e-5)
    found = result.predict_logits() if logits is None else logits
    best = evaluations[int(result.metrics["best_epoch"]) - 1]
    torch.testing.assert_close(found, best, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("model", EXACT)
def test_alone_and_loaded_is_a_plain_loop(model, tmp_path):
    (task,) = tasks_of(model, [0])
    result, expected = run(task, out=tmp_path / "run"), plain(model)
    check(result, *expected)
    seed_all(5)
    loaded = weft.load_result(tmp_path / "run", model=model, graph=GRAPH)
    if model in NOT_RESUMED:
        return
    check(result, *expected, loaded.predict_logits(GRAPH))


@pytest.mark.parametrize("model", [model for model in EXACT if model not in NOT_RESUMED])
def test_resumed_is_a_plain_loop(model, tmp_path, monkeypatch):
    (task,) = tasks_of(model, [0])
    preempted_after(6, task, tmp_path / "run", monkeypatch)
    seed_all(5)
    check(run(task, out=tmp_path / "run", resume=True), *plain(model))


@pytest.mark.parametrize("model", EXACT)
def test_several_seeds_are_plain_loops(model):
    for seed, result in enumerate(run(tasks_of(model, range(2)))):
        check(result, *plain(model, seed))


def test_parameters_in_one_memory_are_refused_by_both_names():
    with pytest.raises(
        weft.SpecError, match=r"a\.weight of model TiedByData is in the memory of the parameter b\.weight"
    ):
        run(tasks_of(weight_memory.TiedByData, [0]))


def test_buffers_in_one_memory_that_change_are_refused_by_both_names():
    with pytest.raises(weft.SpecError, match="buffer table of model ViewsOfBuffers is in the memory of buffer first"):
        run(tasks_of(buffers.ViewsOfBuffers, [0]))


@pytest.mark.parametrize(("model", "name"), OUTSIDE.items())
@pytest.mark.parametrize("seeds", [1, 2])
def test_what_is_outside_of_a_module_is_refused_before_the_first_epoch(model, name, seeds):
    with pytest.raises(weft.SpecError, match=f"changes {name} when it is called, and gives other numbers"):
        run(tasks_of(model, range(seeds)))


class InAnyType(weight_memory.DetachedWeight):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return self.last(h) + h @ self.w.T.to(h.dtype)


def test_views_of_weights_are_refused_where_weights_are_cast():
    with pytest.raises(weft.SpecError, match=r"keeps w, which is in the memory of last\.weight; only precision='fp32'"):
        run(tasks_of(InAnyType, [0], precision="bf16", epochs=2))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (weight_memory.DetachedWeight, "w is in the memory of last.weight"),
        (weight_memory.ViewMadeInCall, "it reads 'w' of an earlier call"),
        (evaluation_only.WholeNumbers, "it reads 'order' of an earlier call"),
        (teachers.TeacherInList, "'teachers'"),
        (tables_and_banks.FirstCallDecides, "it reads 'centre' of an earlier call"),
        (made_in_call.MakesParameter, "it makes 'scale' when it is called, and not in its constructor"),
        (made_in_call.MakesModule, "it makes 'extra' when it is called, and not in its constructor"),
        (wrapped_layers.ScriptedLayer, "last went through torch.jit"),
    ],
)
def test_why_several_are_not_one_stack(model, reason):
    notes = []
    run(
        tasks_of(model, range(2), epochs=2),
        on_event=lambda e: notes.append(e.data["message"]) if e.kind == "note" else 0,
    )
    assert any("not as one stack" in note and reason in note for note in notes), notes


STACKED = [
    buffers.NotPersistent,
    buffers.InPlaceBuffer,
    buffers.PrototypesInLoss,
    outside.LruCache,
    python_objects.WeakReference,
]


@pytest.mark.parametrize("model", STACKED)
def test_what_keeps_nothing_in_python_is_one_stack(model):
    assert [plan.join for plan in run(tasks_of(model, range(2), epochs=2)).plan] == ["stacked"]


class CachedLayer(Base):
    """Keeps a form of the graph, as PyG's layers with ``cached=True`` do."""

    form = None

    def forward(self, x, adj):
        if self.form is None:
            self.form = torch.arange(x.shape[0]).remainder(3)[:, None].float()
        return self.last(self.hidden(x, adj) + self.form)


def test_caches_of_the_graph_are_left_out_of_files():
    assert run(tasks_of(CachedLayer, [0], epochs=2)[0]).kept == {}


class ForItsAuthor(Base):
    def forward(self, x, adj):
        self.embedding = self.hidden(x, adj)
        return self.last(self.embedding)


def test_what_no_call_reads_is_left_out_of_files():
    assert run(tasks_of(ForItsAuthor, [0], epochs=2)[0]).kept == {}


def test_an_object_whose_weights_are_kept_elsewhere_is_a_plain_loop():
    seed_all(0)
    module = weight_memory.DetachedWeight(6, 3)
    result = run(weft.Task(graph=GRAPH, model=module, epochs=EPOCHS, lr=RATE))
    check(result, *plain(weight_memory.DetachedWeight))


LOADING = """
import sys, torch, weft
from importlib import import_module
from tests.runtime.user_modules.test_exact import GRAPH
run, file, name, logits = sys.argv[1:]
result = weft.load_result(run, model=getattr(import_module(file), name), graph=GRAPH)
torch.save(result.predict_logits(GRAPH), logits)
"""


@pytest.mark.parametrize("model", [teachers.TeacherMadeInCall, containers.DataclassState, tables_and_banks.SparseRead])
def test_another_process_predicts_the_same(model, tmp_path):
    result = run(tasks_of(model, [0])[0], out=tmp_path / "run")
    given = [tmp_path / "run", model.__module__, model.__name__, tmp_path / "logits"]
    subprocess.run([sys.executable, "-W", "ignore", "-c", LOADING, *given], check=True)
    torch.testing.assert_close(torch.load(tmp_path / "logits"), result.predict_logits())
