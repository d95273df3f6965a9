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
    hooks,
    made_in_call,
    outside,
    python_objects,
    random_draws,
    tables_and_banks,
    teachers,
    weight_memory,
    wrapped_layers,
)
from tests.runtime.user_modules.odd_modules import Base
from tests.runtime.user_modules.test_exact import EPOCHS, GRAPH, RATE, preempted_after, run, seed_all, tasks_of
from weft.runtime.modules.state import GlobalsSnapshot

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's on modules of torch.jit, old norms and sparse tensors
OUTSIDE = {
    outside.GlobalInEvaluation: "SEEN",
    outside.ByModule: "BY_MODULE",
    outside.MutableDefault: "memory",
    outside.made_in_function: "calls",
}
REFUSED = (weight_memory.TiedByData, buffers.ViewsOfBuffers)
# State that is neither plain data nor declared, by the name that the refusal to resume has.
NOT_PLAIN = {
    containers.NamedTupleState: "seen",
    containers.DataclassState: "running",
    containers.NewObjectEachCall: "running",
    containers.DefaultDict: "seen",
    containers.ModulesInDict: "experts",
    evaluation_only.InSlots: "own",
    hooks.HookCounts: "something outside",
    made_in_call.MakesModule: "extra",
    made_in_call.MadeOverNone: "extra",
    python_objects.ItertoolsCount: "numbers",
    python_objects.IteratorInEvaluation: "factors",
    random_draws.OwnTorchGenerator: "draw",
    random_draws.OwnGenerators: "draws",
    teachers.TeacherInList: "teachers",
    teachers.TeacherMadeInCall: "teachers",
    teachers.InnerAverage: "average",
    teachers.InnerOptimizer: "probe",
    wrapped_layers.ScriptedState: "something outside",
    **OUTSIDE,
}
OTHER_PREDICTIONS = (hooks.HookCounts, *OUTSIDE)  # what functions and globals have at the end is all there is
EXACT = [model for model in ALL if model not in REFUSED]
PLAIN = [model for model in EXACT if model not in NOT_PLAIN]


@pytest.fixture(autouse=True)
def nothing_outside():
    """Every loop of a test begins as in a process of its own."""
    kept = GlobalsSnapshot(nn.ModuleList(model(6, 3) for model in ALL if model in OUTSIDE))
    forget.append(kept.restore)
    yield
    forget.pop()()


forget: list = []


def plain(model, seed=0):
    """Losses and evaluations of the loop that a user would write."""
    for restore in forget:
        restore()
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


def check(result, losses, evaluations, logits=None, predicts=True):
    """The result is the loop's, and predicts what that gave at the best epoch."""
    assert result.status == "finished", result.message
    assert result.history["loss"] == pytest.approx(losses, rel=2e-4, abs=2e-5)
    if not predicts:
        return
    found = result.predict_logits() if logits is None else logits
    best = evaluations[int(result.metrics["best_epoch"]) - 1]
    torch.testing.assert_close(found, best, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("model", EXACT)
def test_alone_is_a_plain_loop(model):
    (task,) = tasks_of(model, [0])
    result = run(task)
    check(result, *plain(model), predicts=model not in OTHER_PREDICTIONS)


@pytest.mark.parametrize("model", PLAIN)
def test_loaded_is_a_plain_loop(model, tmp_path):
    (task,) = tasks_of(model, [0])
    result, expected = run(task, out=tmp_path / "run"), plain(model)
    seed_all(5)
    loaded = weft.read(tmp_path / "run", model=model, graph=GRAPH)
    check(result, *expected, loaded.predict_logits(GRAPH))


@pytest.mark.parametrize("model", PLAIN)
def test_resumed_is_a_plain_loop(model, tmp_path, monkeypatch):
    (task,) = tasks_of(model, [0])
    preempted_after(6, task, tmp_path / "run", monkeypatch)
    seed_all(5)
    check(run(task, out=tmp_path / "run", resume=True), *plain(model))


@pytest.mark.parametrize(("model", "name"), NOT_PLAIN.items())
def test_state_that_is_not_plain_data_is_not_resumed(model, name, tmp_path, monkeypatch):
    (task,), notes = tasks_of(model, [0]), []
    run(task, on_event=lambda e: notes.append(e.data["message"]) if e.kind == "note" else 0)
    assert sum(f"keeps '{name}" in note or f"keeps {name}" in note for note in notes) == 1, notes
    preempted_after(6, task, tmp_path / "run", monkeypatch)
    with pytest.raises(weft.SpecError, match=rf"keeps '{name}.* cannot be resumed: return it from get_extra_state"):
        run(task, out=tmp_path / "run", resume=True)


@pytest.mark.parametrize("model", EXACT)
def test_several_seeds_are_plain_loops(model):
    for seed, result in enumerate(run(tasks_of(model, range(2)))):
        check(result, *plain(model, seed), predicts=model not in OTHER_PREDICTIONS)


def test_parameters_in_one_memory_are_refused_by_both_names():
    with pytest.raises(
        weft.SpecError, match=r"b\.weight of model TiedByData is in the memory of the parameter a\.weight"
    ):
        run(tasks_of(weight_memory.TiedByData, [0]))


def test_buffers_in_one_memory_that_change_are_refused_by_both_names():
    with pytest.raises(weft.SpecError, match="buffer first of model ViewsOfBuffers is in the memory of buffer table"):
        run(tasks_of(buffers.ViewsOfBuffers, [0]))


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
        (weight_memory.ViewMadeInCall, "it keeps 'w' from call to call"),
        (evaluation_only.WholeNumbers, "it keeps 'order' from call to call"),
        (teachers.TeacherInList, "'teachers'"),
        (tables_and_banks.FirstCallDecides, "it keeps 'centre' from call to call"),
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


class ForItsAuthor(Base):
    def forward(self, x, adj):
        self.embedding = self.hidden(x, adj)
        return self.last(self.embedding)


@pytest.mark.parametrize(("model", "name"), [(CachedLayer, "form"), (ForItsAuthor, "embedding")])
def test_every_attribute_that_is_plain_data_is_in_the_files(model, name, tmp_path):
    result = run(tasks_of(model, [0], epochs=2)[0], out=tmp_path / "run")
    loaded = weft.read(tmp_path / "run", model=model, graph=GRAPH).model
    torch.testing.assert_close(getattr(loaded, name), getattr(result.model, name))
    assert [plan.join for plan in run(tasks_of(model, range(2), epochs=2)).plan] == ["stacked"]


class Declared(Base):
    """Its state is an object, which it declares as torch's state_dict would have it."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.running = containers.Running()

    def get_extra_state(self):
        return {"mean": self.running.mean, "counts": self.running.counts}

    def set_extra_state(self, state):
        self.running = containers.Running(state["mean"], list(state["counts"]))

    forward = containers.DataclassState.forward


def test_declared_state_is_resumed_and_loaded(tmp_path, monkeypatch):
    (task,) = tasks_of(Declared, [0])
    preempted_after(6, task, tmp_path / "run", monkeypatch)
    result = run(task, out=tmp_path / "run", resume=True)
    check(result, *plain(Declared))
    check(result, *plain(Declared), weft.read(tmp_path / "run", model=Declared, graph=GRAPH).predict_logits(GRAPH))


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
result = weft.read(run, model=getattr(import_module(file), name), graph=GRAPH)
torch.save(result.predict_logits(GRAPH), logits)
"""


@pytest.mark.parametrize("model", [containers.Queue, tables_and_banks.SparseRead])
def test_another_process_predicts_the_same(model, tmp_path):
    result = run(tasks_of(model, [0])[0], out=tmp_path / "run")
    given = [tmp_path / "run", model.__module__, model.__name__, tmp_path / "logits"]
    subprocess.run([sys.executable, "-W", "ignore", "-c", LOADING, *given], check=True)
    torch.testing.assert_close(torch.load(tmp_path / "logits"), result.predict_logits())
