"""Inference tasks: the numbers of the trained model, beside training, before its target; refused with a sentence."""

from __future__ import annotations

import json
import time

import pytest
import torch
from safetensors.torch import load_file

import weft
from tests.graphs_for_tests import tiny_graph
from tests.serve.serving import FAULTY, TASK, Queue
from weft.core.errors import GraphError, InputError, SpecError
from weft.engine.inference import predict
from weft.sched.policies import find_policy
from weft.sched.queue_state import DeviceState, MachineState, QueuedTask, RunningGroup
from weft.serve.estimates import inference_estimate
from weft.serve.queue_db import QueueTask, Submission
from weft.serve.submissions import Registry, read_submissions

OTHER = {"model": "gat", "norm": "batch", "hidden": 16}
SAMPLED = {"batch": 64, "fanout": [3, 3]}  # the mode follows from them


# ---- the numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, OTHER, {"mode": "sampled", "fanout": [3, 3], "batch": 64}, {"feature_norm": "row"}]
)
def test_the_logits_are_those_that_training_was_evaluated_with(tmp_path, settings):
    task = weft.Task(**{**TASK, **settings, "epochs": 3, "name": "t"})
    trained = weft.run(task, device="cpu", progress=False, out=tmp_path)
    found = predict(task, tmp_path / "model.safetensors", nodes="test", device="cpu")
    assert found.metrics["accuracy"] == pytest.approx(trained.metrics["test_accuracy"], abs=1e-9)
    if "feature_norm" not in settings:
        graph = weft.load("demo")
        assert torch.equal(found.logits, trained.model(graph.x, graph.adj)[graph.test])


def test_a_model_of_the_users_own(tmp_path):
    task = weft.Task(graph="demo", model=f"{FAULTY}:Plain", epochs=3, name="t")
    trained = weft.run(task, device="cpu", progress=False, out=tmp_path)
    found = predict(task, tmp_path / "model.safetensors", nodes="test", device="cpu")
    assert found.metrics["accuracy"] == pytest.approx(trained.metrics["test_accuracy"], abs=1e-9)
    assert not found.logits.requires_grad


def test_a_split_is_that_of_the_training(tmp_path):
    weft.load("demo").random_splits(3, train=0.5, val=0.2).save(tmp_path / "graph.npz")
    task = weft.Task(str(tmp_path / "graph.npz"), hidden=8, epochs=2, split=2, name="t")
    trained = weft.run(task, device="cpu", progress=False, out=tmp_path / "run")
    found = predict(task, tmp_path / "run" / "model.safetensors", nodes="test", device="cpu")
    assert torch.equal(found.nodes, weft.load(tmp_path / "graph.npz").split(2).test)
    assert found.metrics["accuracy"] == pytest.approx(trained.metrics["test_accuracy"], abs=1e-6)


def test_a_graph_or_a_model_that_has_changed_since_the_training_is_refused(tmp_path):
    weights, graph = tmp_path / "run" / "model.safetensors", tmp_path / "graph.npz"
    tiny_graph(0).save(graph)
    (tmp_path / "net.py").write_text("import weft\nclass Net(weft.nn.GCN):\n    pass\n")
    task = weft.Task(graph=str(graph), model=f"{tmp_path}/net.py:Net", hidden=4, epochs=1, name="t")
    weft.run(task, device="cpu", progress=False, out=weights.parent)
    assert len(predict(task, weights, device="cpu").nodes) == 60
    with (tmp_path / "net.py").open("a") as file:
        file.write("# another line\n")
    with pytest.raises(SpecError, match="has changed since it was trained; bring it back or train again"):
        predict(task, weights, device="cpu")
    (tmp_path / "net.py").write_text("import weft\nclass Net(weft.nn.GCN):\n    pass\n")
    tiny_graph(1).save(graph, overwrite=True)
    with pytest.raises(SpecError, match=r"had 60 nodes, 248 edges, .* and has 60 nodes, 234 edges"):
        predict(task, weights, device="cpu")
    tiny_graph(1).save(tmp_path / "other.npz")
    assert len(predict(weft.Task(str(tmp_path / "other.npz"), task.model, hidden=4), weights, device="cpu").nodes) == 60


def test_layer_by_layer_has_the_same_numbers(tmp_path):
    task = weft.Task(**{**TASK, **SAMPLED, "model": "sage", "epochs": 2, "name": "t"})
    weft.run(task, device="cpu", progress=False, out=tmp_path)
    whole = predict(task, tmp_path / "model.safetensors", device="cpu")
    for nodes in (None, [3, 5, 8]):
        layers = predict(task, tmp_path / "model.safetensors", nodes=nodes, device="cpu", layerwise=True)
        assert torch.allclose(layers.logits, whole.logits[layers.nodes], atol=1e-5)


def test_the_estimate_of_a_sampled_training_is_that_of_the_whole_graph_or_of_its_layers(tmp_path):
    whole = inference_estimate(weft.Task(**TASK), "cpu")
    sampled = inference_estimate(weft.Task(**{**TASK, **SAMPLED}), "cpu")
    assert sampled["bytes"] == whole["bytes"]
    assert "layerwise" not in sampled
    large = weft.Task("shape:ogbn-papers100M", model="sage", hidden=256, batch=1024, fanout=[5, 5], layers=2)
    layers = inference_estimate(large, "cuda:0")
    assert layers["layerwise"]
    assert "layer by layer, since the whole graph would take" in layers["why"]


def test_a_model_that_keeps_state_is_refused(tmp_path):
    task = weft.Task(graph="demo", model=f"{FAULTY}:Counts", epochs=1, name="t")
    weft.run(task, device="cpu", progress=False, out=tmp_path)
    with pytest.raises(SpecError, match="keeps state that its weights do not have"):
        predict(task, tmp_path / "model.safetensors", device="cpu")


def test_weights_of_another_model_are_refused(tmp_path):
    weft.run(weft.Task(**{**TASK, "epochs": 1}), device="cpu", progress=False, out=tmp_path)
    with pytest.raises(SpecError, match="give the settings and the graph that they were trained with"):
        predict(weft.Task(**{**TASK, "hidden": 9}), tmp_path / "model.safetensors", device="cpu")
    with pytest.raises(SpecError, match="cannot be read"):
        predict(weft.Task(**TASK), tmp_path / "result.json", device="cpu")
    with pytest.raises(
        GraphError, match=r"nodes\[1\] = 1000000 is out of range: nodes of graph 'demo' must lie in 0..2399"
    ):
        predict(weft.Task(**TASK), tmp_path / "model.safetensors", nodes=[1, 10**6], device="cpu")


# ---- in the queue --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def queue(tmp_path_factory):
    made = Queue(tmp_path_factory.mktemp("inference"))
    yield made
    made.close()


def infer(queue: Queue, of: str, after=(), **more) -> str:
    settings = queue.db.get(of).spec["task"]
    spec = {"task": settings, "kind": "inference", "infer": {"of": of, "nodes": "test", **more}}
    name = queue.db.submit(Submission(spec, after=(*after, of))).id
    queue.supervisor.wake()
    return name


@pytest.mark.parametrize(
    "settings",
    [
        OTHER,
        {"model": f"{FAULTY}:Plain", "hidden": weft.Task(graph="demo").hidden},
        SAMPLED,
        SAMPLED | {"mode": "sampled", "model": "sage"},
        SAMPLED | {"model": f"{FAULTY}:Plain", "hidden": weft.Task(graph="demo").hidden},
    ],
)
def test_it_waits_for_its_training_and_has_its_numbers(queue, settings):
    (trained,) = queue.submit(settings | {"epochs": 5})
    asked = infer(queue, trained)
    queue.wait([trained])
    result = json.loads((queue.options.runs / queue.db.get(trained).result["folder"] / "result.json").read_text())
    assert (result["task"]["mode"] == "sampled") == ("fanout" in settings)
    one, two = queue.wait([trained, asked])
    assert (one.state, two.state) == ("done", "done"), two.error
    assert two.result["latency_seconds"] > 0
    assert two.result["metrics"]["accuracy"] == pytest.approx(one.result["metrics"]["test_accuracy"], abs=1e-9)
    folder = queue.options.runs / two.result["folder"]
    found = load_file(folder / "predictions.safetensors")
    assert found["logits"].shape == (len(weft.load("demo").test), weft.load("demo").num_classes)
    assert json.loads((folder / "result.json").read_text())["kind"] == "inference"


def test_it_preempts_a_training_for_its_target_and_the_training_goes_on_bit_for_bit(queue):
    (trained,) = queue.submit({"epochs": 2, "seed": 3})
    queue.wait([trained])
    (slow,) = queue.submit({"epochs": 500, "seed": 4})
    queue.until(lambda: queue.epoch(slow) > 0)
    begin = time.time()
    asked = infer(queue, trained, latency_target=1.0)
    queue.wait([asked])
    took, state = time.time() - begin, queue.db.get(slow).state
    assert state != "done", f"the training had ended before; the answer took {took:.2f} s"
    queue.wait([slow])
    told = [event.data.get("error") for event in queue.db.events(task=slow, limit=100_000)]
    assert "preempted" in told
    alone = weft.run(weft.Task(**{**TASK, "epochs": 500, "seed": 4}), device="cpu", progress=False)
    found = queue.history(slow)
    assert found["loss"] == [float(value) for value in alone.history["loss"]]


def test_weights_that_are_gone_fail_that_task_alone(queue):
    (trained,) = queue.submit({"epochs": 1, "seed": 8})
    (done,) = queue.wait([trained])
    (queue.options.runs / done.result["folder"] / "model.safetensors").unlink()
    (lost,) = queue.wait([infer(queue, trained)])
    assert lost.state == "failed"
    assert "cannot be read" in lost.error
    (other,) = queue.wait(queue.submit({"epochs": 1, "seed": 9}))
    assert other.state == "done"


# ---- the policy ----------------------------------------------------------------------------------------------

ASKED = QueuedTask("asked", 100, 0.1, kind="inference", latency_target=1.0, arrival=0.0)


def decide(task: QueuedTask, *running: RunningGroup, now: float = 0.0, inferring: int = 0, workers: int = 1):
    device = DeviceState("d", 10_000, workers=workers, inference_workers=inferring)
    return find_policy("backfill").schedule([task], running, MachineState((device,), now))


def training(ends: float, priority: int = 0) -> RunningGroup:
    return RunningGroup("g", "d", ("t",), 100, ends=ends, priority=priority)


def test_a_training_gives_way_only_for_a_target_that_can_still_be_met():
    assert decide(ASKED, training(ends=9.0)).preempt == ("g",)
    assert decide(ASKED, training(ends=0.5)).preempt == ()  # it ends in time by itself
    assert decide(ASKED, training(ends=9.0), now=2.0).preempt == ()  # it is late already
    assert decide(ASKED, training(ends=9.0, priority=1)).preempt == ()
    assert decide(QueuedTask("asked", 100, 0.1, kind="inference"), training(ends=9.0)).preempt == ()


def test_a_worker_that_is_kept_for_inference_takes_it_at_once():
    assert decide(ASKED, training(ends=9.0), inferring=1, workers=2).started == ("asked",)
    other = QueuedTask("other", 100, 1.0)
    assert decide(other, training(ends=9.0), inferring=1, workers=2).started == ()


def test_inference_with_a_target_is_considered_before_trainings_of_its_priority():
    tasks = [QueuedTask("training", 100, 0.01, arrival=0.0), ASKED]
    machine = MachineState((DeviceState("d", 10_000, workers=1),), 0.1)
    assert find_policy("backfill").schedule(tasks, [], machine).started == ("asked",)


# ---- requests ------------------------------------------------------------------------------------------------

KNOWN = {
    "a": QueueTask("a", 1, "done", {"task": {**TASK, "name": "x"}}),
    "i": QueueTask("i", 2, "done", {"task": TASK, "kind": "inference"}),
}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"infer": 3}, "infer must be an object"),
        ({"infer": {}}, "give infer.of"),
        ({"infer": {"of": "a"}, "task": TASK}, "give infer.of"),
        ({"infer": {"of": "a", "weights": "w.safetensors"}}, "give infer.of"),
        ({"infer": {"of": ["a"]}}, "must be the id of a task"),
        ({"infer": {"of": "i"}}, "is an inference task"),
        ({"infer": {"of": "a", "nodes": "some"}}, "infer.nodes must be"),
        ({"infer": {"of": "a", "nodes": [True]}}, "infer.nodes must be"),
        ({"infer": {"of": "a", "nodes": [-1]}}, "infer.nodes must be"),
        ({"infer": {"of": "a", "latency_target": 0}}, "latency_target=0 must be"),
        ({"infer": {"of": "a", "wieghts": 0}}, "unknown field infer.wieghts"),
        ({"infer": {"of": "a", "graph": "../x"}}, "no graphs folder"),
        ({"infer": {"weights": "/etc/passwd"}, "task": TASK}, "safetensors file inside the graphs folder"),
        ({"infer": {"weights": "../w.safetensors"}, "task": TASK}, "no graphs folder"),
        ({"infer": {"weights": "w.safetensors"}, "task": [1]}, "an object of settings"),
        ({"infer": {"of": "a"}, "tasks": [TASK]}, "submitted alone"),
        ({"infer": {"of": "a", "resident": 1}}, "infer.resident must be true or false"),
        ({"infer": {"of": "a", "resident": True, "nodes": [3]}}, "given nodes by requests"),
    ],
)
def test_what_cannot_be_asked_for(body, told):
    with pytest.raises(InputError, match=told):
        read_submissions(body, Registry(), "me", KNOWN.__getitem__)


def test_what_can_be_asked_for(tmp_path):
    (one,) = read_submissions({"infer": {"of": "a", "nodes": [1, 2]}}, Registry(), "me", KNOWN.__getitem__)
    assert one.after == ("a",)
    assert one.spec["infer"] == {"of": "a", "nodes": [1, 2]}
    (tmp_path / "w.safetensors").write_bytes(b"")
    body = {"task": TASK, "infer": {"weights": "w.safetensors", "latency_target": 2}, "key": "k"}
    (two,) = read_submissions(body, Registry(graphs=tmp_path), "me", KNOWN.__getitem__)
    assert two.key == "me/k/0"
    assert two.spec["infer"]["weights"] == str(tmp_path / "w.safetensors")
