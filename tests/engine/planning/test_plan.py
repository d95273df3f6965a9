"""weft.plan: any task or sweep, without a GPU and without the graph; mistakes are named in a sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import weft
from tests.graphs_for_tests import tiny_graph
from weft.core import gpus
from weft.core.errors import GraphError, SpecError
from weft.core.sweep import Sweep
from weft.engine import estimator as estimate
from weft.engine.home import machine_folder, machine_name
from weft.engine.learning import keep
from weft.engine.machine import find_machine, keep_probe, load_calibration, machine_with, update_calibration
from weft.engine.plan import plan
from weft.graph.catalog import shapes
from weft.planner.cost.calibration import Observation
from weft.planner.grouping.groups import plan_as_one_group
from weft.planner.machine_profiles import profile
from weft.runtime import dry_run

ARXIV = "shape:ogbn-arxiv"


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))


def test_one_task_from_the_table_of_its_shape(monkeypatch):
    monkeypatch.setattr(shapes, "make", lambda *_, **__: pytest.fail("the graph was generated"))
    report = plan(weft.Task(graph=ARXIV, model="gcn", layers=3), machine="h200")
    assert report.fits
    assert len(report.tasks) == len(report.groups) == 1
    assert report.tasks[0].parameters == 128 * 64 + 64 + 64 * 64 + 64 + 64 * 40 + 40
    cost = report.groups[0].cost
    # At least the features, their aggregate and two hidden layers; benchmarks/MEASURED.md: 0.65 GB, 0.94 ms per step.
    assert 169_343 * 4 * (128 + 128 + 64 + 64) < cost.peak_bytes < 0.8e9
    assert 0.4e-3 < cost.epoch_seconds < 4e-3
    assert cost.peak_bytes <= cost.reserved_bytes < cost.total_bytes
    assert report.groups[0].plan.cost["epoch_seconds"] == cost.epoch_seconds
    assert not torch.cuda.is_initialized()


def test_a_sweep_is_grouped_and_every_group_has_its_reasons():
    sweep = Sweep(ARXIV, model=["gcn", "gat"], layers=2, hidden=16, heads=4, lr=[0.01, 0.001], seed=range(3))
    report = weft.plan(sweep, machine="h200")
    assert len(report.tasks) == 12
    assert sorted(name for group in report.groups for name in group.plan.members) == sorted(
        t.name for t in report.tasks
    )
    for task in report.tasks:
        assert task.name in report.groups[task.group].plan.members
    assert all(group.plan.why for group in report.groups)
    together = sum(group.run_seconds for group in report.groups)
    assert together < sum(task.epochs * task.cost.epoch_seconds for task in report.tasks)


def test_a_list_of_tasks_and_a_graph_object():
    graph = tiny_graph()
    report = plan([weft.Task(graph=graph, name="a"), weft.Task(graph=graph, name="b", lr=0.1)], machine="cpu")
    assert len(report.tasks) == 2
    assert report.groups[0].plan.device == "cpu"
    assert set(report.groups[0].cost.seconds) == {"cpu"}
    assert "tiny (60 nodes" in report.graphs[0]


def test_a_small_budget_makes_smaller_groups_and_then_names_what_would_fit():
    sweep = Sweep(ARXIV, model="gcn", layers=3, hidden=64, seed=range(8))
    free = plan(sweep, machine="h200")
    tight = plan(sweep, machine="h200", budget="2GiB")
    assert tight.fits
    assert len(tight.groups) > len(free.groups)
    assert tight.peak_bytes <= 2 * 2**30 < free.peak_bytes
    tighter = plan(weft.Task(graph=ARXIV, model="gcn", layers=3, hidden=512), machine="h200", budget="2GiB")
    assert not tighter.fits
    (nearest,) = tighter.nearest
    changed = weft.Task(graph=ARXIV, model="gcn", layers=3, hidden=512).with_values(**nearest.changes)
    assert plan(changed, machine="h200", budget="2GiB").fits
    assert "it would fit on" in str(tighter)


def test_where_nothing_fits_it_says_what_is_in_the_way():
    report = plan(weft.Task(graph="shape:ogbn-products", model="sage"), machine="h200", budget="1GiB")
    assert not report.fits
    assert report.nearest == ()
    assert "nothing smaller that was tried fits; the graph and its features alone take" in str(report)


def test_evaluating_rarely_is_planned_as_faster():
    often, rarely = (plan(weft.Task(graph=ARXIV, eval_every=k), machine="h200") for k in (1, 10))
    assert rarely.run_seconds < 0.9 * often.run_seconds


@pytest.mark.parametrize("weave", [None, "merged"])
def test_the_forward_pass_of_a_second_stack_is_no_evaluation(weave):
    tasks = [weft.Task(graph="shape:pubmed", layers=layers, name=str(layers), eval_every=1000) for layers in (2, 3)]
    (group,) = plan(tasks, machine="h200", options=weft.RunOptions(weave=weave)).groups
    assert len(group.plan.stacks) == 2
    assert group.cost.phases["evaluation"] < 0.01 * group.cost.epoch_seconds
    assert group.cost.phases["forward"] > 0.2 * group.cost.epoch_seconds


def test_models_of_ones_own():
    class Odd(nn.Module):
        def __init__(self, inside, outside):
            super().__init__()
            self.first, self.norm = nn.Linear(inside, 24), nn.LayerNorm(24)
            self.conv = weft.nn.GCNConv(24, outside)

        def forward(self, x, adj):
            return self.conv(torch.relu(self.norm(self.first(x))), adj)

    report = plan(weft.Task(graph=ARXIV, model=Odd), machine="h200")
    assert report.tasks[0].parameters == 128 * 24 + 24 + 48 + 24 * 40 + 40
    assert report.groups[0].unknown == ()


class Broken(nn.Module):
    """Wants features that are not there."""

    def __init__(self, inside, outside):
        super().__init__()
        self.linear = nn.Linear(inside + 1, outside)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize(
    ("task", "options", "error", "message"),
    [
        ({"model": Broken}, {}, SpecError, "model Broken"),
        ({}, {"machine": "h2000"}, SpecError, "did you mean 'h200'"),
        ({}, {"machine": "nowhere/m.json"}, SpecError, "no such file"),
        ({}, {"budget": "much"}, SpecError, "budget='much' is not an amount of memory"),
        ({}, {"budget": "10KiB"}, SpecError, "below the weights and optimizer state of task 'gcn' alone"),
        ({"graph": "shape:kora"}, {}, GraphError, "no shape 'kora'"),
        ({"graph": 1.5j}, {}, SpecError, "must be a name, a path, a weft.Graph, or a Data or dataset of PyG"),
    ],
)
def test_mistakes_are_one_sentence(task, options, error, message):
    with pytest.raises(error, match=message):
        plan(weft.Task(**{"graph": ARXIV, **task}), **{"machine": "h200", **options})


@pytest.mark.parametrize(
    ("missing", "message"), [("x", "has no features"), ("y", "has no labels"), ("train", "has no training nodes")]
)
def test_graphs_that_cannot_be_trained_on(missing, message):
    whole = tiny_graph()
    parts = {name: getattr(whole, name) for name in ("x", "y", "train", "val", "test") if name != missing}
    if missing == "y":
        parts = {"x": whole.x}
    with pytest.raises(GraphError, match=message):
        plan(weft.Task(graph=weft.Graph(whole.adj, **parts)), machine="cpu")


@pytest.mark.parametrize("work", [3, "gcn", [], [1]])
def test_what_is_not_work(work):
    with pytest.raises(SpecError, match=r"weft.plan takes a weft.Task, a weft.Sweep or a list of tasks"):
        plan(work)


def test_groups_alike_are_followed_once(monkeypatch):
    followed, follow = [], dry_run.capture
    monkeypatch.setattr(dry_run, "capture", lambda *args, **kw: followed.append(args) or follow(*args, **kw))
    estimator = estimate.Estimator(profile("h200"))

    def cost(**settings):
        tasks = Sweep(ARXIV, epochs=5, **settings).tasks()
        return estimator.together(tasks, plan_as_one_group(tasks, estimator.stats(tasks[0]), "cuda")).cost

    first = cost(hidden=[8, 16], seed=[0, 1])
    assert cost(hidden=[16, 8], lr=[0.1, 0.2]) == first
    assert len(followed) == 1
    assert cost(hidden=[8, 32], seed=[0, 1]).peak_bytes > first.peak_bytes
    assert cost(hidden=[8, 16], seed=[0, 1, 2]).peak_bytes > first.peak_bytes
    assert len(followed) == 3


def test_what_is_no_machine():
    with pytest.raises(SpecError, match="machine=3 must be a name such as 'h200'"):
        plan(weft.Task(graph="demo"), machine=3)


# ---- machines ----------------------------------------------------------------------------------------


def test_the_machine_at_hand_is_the_probed_one(monkeypatch):
    assert find_machine().device == "cpu"
    probed = profile("cpu")
    mine = replace(probed, name=machine_name("cpu"), measured=True).with_host(cores=77)
    keep_probe(mine)
    assert find_machine() == mine


def test_the_machine_at_hand_has_the_first_gpu_that_cuda_shows(monkeypatch):
    there = [gpus.Gpu("NVIDIA A100-SXM4-80GB", "GPU-1"), gpus.Gpu("NVIDIA H200", "GPU-2")]
    monkeypatch.setattr(gpus, "_in_files", lambda: there)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setenv(gpus.VISIBLE, "1,0")
    assert find_machine().name == machine_name("NVIDIA H200")
    monkeypatch.setenv(gpus.VISIBLE, "")
    assert find_machine().name == machine_name("cpu")


def test_a_gpu_without_cuda_started(monkeypatch):
    monkeypatch.setattr("weft.engine.machine.gpu_names", lambda: ["NVIDIA A100-SXM4-80GB"])
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    found = find_machine()
    assert found.name == machine_name("NVIDIA A100-SXM4-80GB")  # as a probe or a run would call it
    assert found.copy_bandwidth == profile("a100-80g").copy_bandwidth
    monkeypatch.setattr("weft.engine.machine.gpu_names", lambda: ["NVIDIA Imaginary"])
    with pytest.raises(SpecError, match="nothing is known of the GPU 'NVIDIA Imaginary'; run `weft probe`"):
        find_machine()


def test_a_gpu_that_nobody_described_is_what_it_says_of_itself(monkeypatch):
    said = SimpleNamespace(
        total_memory=24 * 2**30, multi_processor_count=72, L2_cache_size=6 << 20, major=8,
        clock_rate=1_700_000, memory_bus_width=384, memory_clock_rate=6_250_000,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Imaginary")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: said)
    found = machine_with(torch.device("cuda", 0))
    assert (found.name, found.memory_bytes, found.measured) == (machine_name("NVIDIA Imaginary"), 24 * 2**30, False)
    assert found.copy_bandwidth == pytest.approx(600e9 * 4.26 / 4.8, rel=0.05)
    assert found.l2_bytes == 6 << 20


def test_corrections_of_other_rates_are_left_alone():
    machine = profile("h200")
    keep(machine, [Observation({"spmm": 1.0}, 2.0, "run")])
    assert load_calibration(machine) is not None
    assert load_calibration(machine.with_device(memory_bytes=1 << 30, sources={})) is not None
    assert load_calibration(machine.with_device(copy_bandwidth=1e12)) is None


def test_a_machine_from_a_file(tmp_path):
    (tmp_path / "lab.json").write_text(profile("v100-32g").to_json())
    assert find_machine(tmp_path / "lab.json") == profile("v100-32g")
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(SpecError, match=r"bad.json: holds list"):
        find_machine(str(tmp_path / "bad.json"))


def test_calibration_is_used_where_it_is_kept():
    task = weft.Task(graph=ARXIV)
    before = plan(task, machine="h200")
    cost = before.groups[0].cost
    observed = [Observation(cost.uncorrected, 2 * cost.epoch_seconds, f"run {i}") for i in range(5)]
    keep(profile("h200"), observed)
    after = plan(task, machine="h200")
    assert after.run_seconds == pytest.approx(2 * before.run_seconds, rel=0.05)
    assert "corrected by 5 earlier runs" in str(after)
    assert "not corrected" in str(before)
    assert plan(task, machine="a100-80g").groups[0].cost.corrected is False


def test_a_broken_calibration_is_no_calibration(tmp_path):
    update_calibration(profile("h200"), lambda former: former)
    (path,) = machine_folder("h200").glob("calibration.json")
    path.write_text("{")
    assert load_calibration(profile("h200")) is None
    path.write_text(json.dumps({"observations": [3]}))
    assert load_calibration(profile("h200")) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weave": "yes"}, "weave='yes' must be one of off, concurrent, merged, merged"),
        ({"compile": 1}, "compile=1 must be true or false"),
        ({"checkpoint_every": "often"}, "checkpoint_every='often' must be a number"),
        ({"checkpoint_every": -1}, "checkpoint_every=-1 must be at least 0"),
        ({"ranks": 1.5}, "ranks=1.5 must be a whole number"),
        ({"order": "rmc", "ranks": 2}, "order='rmc' must be one of given, degree, bfs, rcm, metis"),
        ({"device": "tpu"}, "device 'tpu' is unknown; use auto, cpu, cuda or cuda:N"),
        ({"budget": "plenty"}, "budget='plenty' is not an amount of memory"),
        ({"batches": 3}, "batches=3 must be a loader of batches"),
        ({"placement": {"features": "gpu"}}, r"must be a weft\.Placement"),
    ],
)
def test_options_are_checked_where_they_are_written(options, message):
    with pytest.raises(SpecError, match=message):
        weft.RunOptions(**options)


@pytest.mark.parametrize("options", [{"ranks": 2}, {"prune": "median"}, {"checkpoint_every": 5.0}, {"device": "cpu"}])
def test_an_option_that_a_plan_does_not_read_is_refused(options):
    (name,) = options
    with pytest.raises(SpecError, match=f"{name}=.* would have no effect on a plan; give it to weft.run"):
        weft.plan(weft.Task(graph="demo"), options=weft.RunOptions(**options))


class Passes(nn.Module):
    """Mostly element-wise passes of torch's."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.layer = weft.nn.GCNConv(in_features, out_features)

    def forward(self, x, graph):
        h = self.layer(x, graph)
        for _ in range(20):
            h = torch.sin(h) * torch.sigmoid(h) + h
        return h


@pytest.mark.parametrize(
    ("model", "epochs", "compiled"), [(Passes, 50_000, True), (Passes, 50, False), ("gcn", 10**6, False)]
)
def test_long_trainings_of_modules_full_of_passes_are_compiled_and_no_others(model, epochs, compiled):
    """A built-in model leaves nothing to fuse, however long it trains."""
    (group,) = weft.plan(weft.Task(graph="shape:ogbn-arxiv", model=model, epochs=epochs), "h200").groups
    assert group.plan.compiled is compiled
    assert group.plan.why[-1].startswith("compiled by Inductor: about" if compiled else "not compiled: Inductor would")


def test_compiling_is_asked_for():
    task = weft.Task(graph="demo")
    chosen = {
        choice: weft.plan(task, "cpu", options=weft.RunOptions(compile=choice)).groups[0].plan.compiled
        for choice in CHOICES
    }
    assert chosen == {None: False, True: True, False: False}


def test_weaving_is_asked_for():
    tasks = [weft.Task(graph="demo", model=model, name=model) for model in ("gcn", "gat")]
    joins = {
        weave: [group.plan.join for group in weft.plan(tasks, "h200", options=weft.RunOptions(weave=weave)).groups]
        for weave in (None, "off", "concurrent", "merged")
    }
    assert joins == {
        None: ["concurrent"],
        "off": ["solo", "solo"],
        "concurrent": ["concurrent"],
        "merged": ["woven"],
    }


CHOICES = (None, True, False)


def test_two_sampled_models_share_the_batches_of_a_graph_that_fills_the_device():
    """Judged by a batch of 0.85 M edges, not by the graph's 124 M: sampled and fetched once for both."""
    about = {"mode": "sampled", "fanout": [15, 10, 5], "batch": 1024, "layers": 3, "hidden": 256}
    tasks = [weft.Task("shape:ogbn-products", model=model, name=model, **about) for model in ("sage", "gcn")]
    (together,) = weft.plan(tasks, "h200").groups
    assert (together.plan.members, together.plan.join) == (("sage", "gcn"), "in turn")
    assert (
        "gcn of 3 layers x 1 sharing batches with sage of 3 layers x 1: sampled and fetched once" in together.plan.why
    )
    apart = weft.plan(tasks, "h200", options=weft.RunOptions(weave="off")).groups
    assert len(apart) == 2
    assert together.cost.phases["fetch"] == pytest.approx(apart[0].cost.phases["fetch"], rel=0.01)
    assert together.cost.epoch_seconds < sum(group.cost.epoch_seconds for group in apart)


def test_structures_that_share_batches_from_host_memory_are_divided_with_the_host():
    about = {"mode": "sampled", "fanout": [15, 10, 5], "batch": 1024, "layers": 3, "hidden": 256}
    tasks = [weft.Task("shape:ogbn-products", model=model, name=model, **about) for model in ("sage", "gcn")]
    placement = weft.Placement(features="host", topology="host")
    (group,) = weft.plan(tasks, "h200", placement=placement).groups
    assert group.plan.division is not None
    assert group.plan.join == "in turn"


RECORDED = json.loads((Path(__file__).parents[3] / "benchmarks" / "results" / "settings.json").read_text())["cells"]
STRUCTURES = {
    "demo, six": ("demo", [("gcn", 2), ("gcn", 3), ("sage", 2), ("sage", 3), ("gin", 2), ("gat", 2)]),
    "pubmed, depths": ("shape:pubmed", [("gcn", layers) for layers in (2, 2, 3, 4)]),
}


@pytest.mark.parametrize("case", STRUCTURES)
def test_joined_groups_are_predicted_in_the_order_that_was_measured(case):
    """Concurrent before merged on pubmed, merged before concurrent on demo; the plan says why it does not merge."""
    graph, structures = STRUCTURES[case]
    tasks = [
        weft.Task(graph, model=m, layers=n, hidden=64, epochs=400, eval_every=400, name=f"{m}-{n}-{i}", seed=i)
        for i, (m, n) in enumerate(structures)
    ]
    reports = {
        weave: weft.plan(tasks, "h200", options=weft.RunOptions(weave=weave))
        for weave in (None, "off", "concurrent", "merged")
    }
    found = {weave: sum(group.cost.epoch_seconds for group in report.groups) for weave, report in reports.items()}
    measured = {cell["side"]: cell["measured_ms"] / 1e3 for cell in RECORDED if cell["case"] == case}
    assert sorted(measured, key=measured.__getitem__) == sorted(measured, key=found.__getitem__)
    assert found["concurrent"] == pytest.approx(measured["concurrent"], rel=0.1)
    assert found["merged"] == pytest.approx(measured["merged"], rel=0.15)
    (default,) = reports[None].groups
    assert (default.plan.join, default.cost.epoch_seconds) == ("concurrent", found["concurrent"])
    assert "not merged: kernels would be compiled for 5 to 29 s; weave='merged' does it" in default.plan.why


TWO = [weft.Task(graph="demo", model=model, name=model) for model in ("gcn", "gat")]
SAMPLED = [task.with_values(mode="sampled", fanout=[5, 3], batch=64) for task in TWO]


@pytest.mark.parametrize(
    ("work", "machine", "options", "message"),
    [
        (TWO[:1], "h200", {"weave": "merged"}, "weave='merged' would have no effect: no two of these tasks differ"),
        (TWO[:1], "h200", {"weave": "off"}, "weave='off' would have no effect"),
        (SAMPLED, "h200", {"weave": "merged+push"}, r"weave='merged\+push' would have no effect: .* the whole of one"),
        (
            TWO,
            "h200",
            {"weave": "merged+push"},
            r"weave='merged\+push' would have no effect: graph 'demo' is symmetric",
        ),
        (TWO, "cpu", {"weave": "concurrent"}, "weave='concurrent' needs a GPU: a CPU runs one operator at a time"),
        (
            SAMPLED,
            "h200",
            {"division": "fixed"},
            "division='fixed' would have no effect: features and edges lie on the",
        ),
        (
            SAMPLED,
            "cpu",
            {"division": 0.5},
            "division=0.5 would have no effect: on a CPU the host prepares all batches",
        ),
        (SAMPLED, "cpu", {"overlap": True}, "overlap=True would have no effect: on a CPU the host prepares all"),
        (TWO, "h200", {"overlap": True}, "overlap=True would have no effect: task 'gcn' trains on the whole graph"),
    ],
)
def test_a_mechanism_that_nothing_would_use_is_refused(work, machine, options, message):
    with pytest.raises(SpecError, match=message):
        weft.plan(work, machine, options=weft.RunOptions.of(**options))


def test_the_overlap_of_batches_is_planned_on_request():
    for place in ("gpu", "host"):
        placement = weft.Placement(features=place, topology=place, overlap=True)
        (group,) = weft.plan(SAMPLED, "h200", placement=placement).groups
        assert group.plan.places.overlap
        assert group.plan.division is None, "the GPU prepares all of them"
    with pytest.raises(SpecError, match="overlap=True does not go with division='fixed'"):
        weft.Placement(overlap=True, division="fixed")
    with pytest.raises(SpecError, match="overlap=True would have no effect: the CPU reads batches from disk"):
        weft.Placement(features="disk", overlap=True)


@pytest.mark.parametrize("model", ["gcn", "gat", "sage", "gin"])
def test_a_narrow_model_on_dropped_sparse_features_is_not_slower_than_a_wide_one(model):
    def seconds(hidden):
        task = weft.Task(graph="demo", model=model, hidden=hidden, dropout=0.5, input_dropout=0.5)
        return plan(task, machine="cpu").groups[0].cost.epoch_seconds

    assert seconds(16) < seconds(64)
