"""A run is planned as weft.plan says, keeps to its budget, and teaches the next plan what it took."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import weft
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import DoesNotFitError, OutOfMemoryError, SpecError
from weft.core.sweep import Sweep
from weft.engine import memory as room
from weft.engine import run_planner as planner
from weft.engine.graphs import Graphs, check_trainable
from weft.engine.home import HOME_VARIABLE, home, machine_folder
from weft.engine.learning import learn
from weft.engine.machine import find_machine, load_calibration, machine_with
from weft.engine.run_planner import RunPlanner
from weft.planner.machine_profiles import profile
from weft.runtime import dry_run

CPU = torch.device("cpu")
ARXIV = "shape:ogbn-arxiv"


@pytest.fixture(scope="module")
def graph():
    return tiny_graph()


@pytest.fixture
def dry_runs(monkeypatch):
    """Every run is planned by a dry run, however small it is."""
    monkeypatch.setattr("weft.engine.run_planner.SMALL_SECONDS", 0.0)


def test_a_run_groups_as_the_plan_says(graph):
    sweep = Sweep(graph, model=["gcn", "gat"], hidden=[8, 16], seed=range(3), epochs=2)
    foreseen = [group.plan for group in weft.plan(sweep).groups]
    done = weft.run(sweep, progress=False, device="cpu").plan
    assert [(plan.members, plan.stacks, plan.join) for plan in done] == [
        (plan.members, plan.stacks, plan.join) for plan in foreseen
    ]
    assert [plan.cost["peak_bytes"] for plan in done] == [plan.cost["peak_bytes"] for plan in foreseen]


def test_groups_are_cut_where_the_captured_memory_ends():
    tasks = Sweep(ARXIV, model="gcn", layers=3, hidden=64, seed=range(8)).tasks()
    for size in ("2GiB", "3GiB"):
        limit = int(size[0]) * 2**30
        plans = RunPlanner(CPU, Graphs(CPU), weft.RunOptions(budget=limit)).groups(tasks)
        foreseen = weft.plan(tasks, budget=size)
        assert [plan.members for plan in plans] == [group.plan.members for group in foreseen.groups]
        assert all(plan.cost["total_bytes"] <= limit for plan in plans)


def test_what_does_not_fit_is_refused_before_anything_is_made(monkeypatch, tmp_path):
    monkeypatch.setattr("weft.graph.catalog.shapes.make", lambda *_, **__: pytest.fail("the graph was generated"))
    task = weft.Task(graph=ARXIV, model="gcn", layers=3, hidden=512, name="wide")
    events = []
    with pytest.raises(DoesNotFitError, match=r"task 'wide' needs .* of 1.00 GiB: does not fit; nearest") as error:
        weft.run(task, device="cpu", budget="1GiB", progress=False, out=tmp_path / "out", on_event=events.append)
    (nearest,) = weft.plan(task, budget="1GiB").nearest
    assert nearest.words in str(error.value)
    assert error.value.exit_code == 4
    assert isinstance(error.value, OutOfMemoryError)
    assert not (tmp_path / "out").exists()
    assert [event.kind for event in events] == ["failed"]
    with pytest.raises(DoesNotFitError, match="task 'wide'"):
        weft.run([task, task.with_values(name="narrow", hidden=4)], device="cpu", budget="1GiB", progress=False)
    with pytest.raises(SpecError, match=r"budget='lots' is not an amount of memory"):
        weft.run(task, budget="lots")
    with pytest.raises(SpecError, match=r"0.98 KiB is below the weights"):
        weft.run(task, device="cpu", budget=1000)


def test_a_budget_that_is_enough(graph):
    result = weft.run(weft.Task(graph=graph, epochs=3), device="cpu", budget="64MiB", progress=False)
    assert result.plan.cost["total_bytes"] <= 64 * 2**20


class Stubborn(nn.Module):
    """A model without a dry run."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = weft.nn.GCNConv(inputs, outputs)

    def forward(self, x, adj):
        return self.conv(x, adj)


def test_a_model_that_cannot_be_followed_trains_by_rule(graph, monkeypatch):
    follow = dry_run.capture

    def capture(tasks, *args, **options):
        if tasks[0].model is Stubborn:
            raise RuntimeError("only training will do")
        return follow(tasks, *args, **options)

    monkeypatch.setattr(dry_run, "capture", capture)
    tasks = [weft.Task(graph=graph, name="own", model=Stubborn, epochs=12), weft.Task(graph=graph, name="a", epochs=12)]
    own, other = weft.run(tasks, device="cpu", progress=False)
    assert (own.status, other.status) == ("finished", "finished")
    assert own.plan.cost == {}
    assert own.plan.why[-1].startswith("not predicted: ")
    assert own.plan.why[-1].endswith("RuntimeError: only training will do; memory by rule of thumb")
    assert other.plan.cost["epoch_seconds"] > 0


@pytest.mark.usefixtures("dry_runs")
def test_a_fault_in_an_estimate_ends_no_run(graph, monkeypatch):
    def faulty(*args):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(planner, "decided_groups", faulty)
    with pytest.raises(ZeroDivisionError):  # in tests
        weft.run(weft.Task(graph=graph, epochs=2), device="cpu", progress=False)
    monkeypatch.delenv("WEFT_STRICT")
    result = weft.run(weft.Task(graph=graph, epochs=2), device="cpu", progress=False)
    assert result.status == "finished"
    assert result.plan.why[-1] == "not predicted: ZeroDivisionError: oops; memory by rule of thumb"


def test_looking_ahead_draws_no_numbers(graph):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    weft.run(weft.Task(graph=graph, model=lambda i, o: weft.nn.GCN(i, 4, o, 2), epochs=1), device="cpu", progress=False)
    assert torch.equal(before, torch.get_rng_state())


# ---- predicted and measured --------------------------------------------------------------------------


@pytest.mark.usefixtures("dry_runs")
def test_a_run_writes_down_what_was_predicted_and_what_it_took(graph, tmp_path):
    weft.run(weft.Task(graph=graph, epochs=12), device="cpu", progress=False, out=tmp_path / "one")
    plan = json.loads((tmp_path / "one" / "result.json").read_text())["plan"]
    assert plan["cost"]["peak_bytes"] > 0
    assert plan["cost"]["epoch_seconds"] > 0
    assert 0 < plan["measured"]["epochs"] <= 12
    assert 0 < plan["measured"]["epoch_seconds"] < 10
    sweep = Sweep(graph, model=["gcn", "sage"], seed=[0, 1], epochs=12)
    weft.run(sweep, device="cpu", progress=False, out=tmp_path / "many")
    plans = json.loads((tmp_path / "many" / "result.json").read_text())["plan"]
    assert len(plans) == 2
    assert all(plan["cost"]["epoch_seconds"] > 0 and plan["measured"]["epoch_seconds"] > 0 for plan in plans)
    for place in ("one", "many"):
        page = (tmp_path / place / "report.html").read_text()
        assert "predicted" in page
        assert "tensors at the peak" in page


@pytest.mark.usefixtures("dry_runs")
def test_the_next_plan_is_corrected_by_what_a_run_took(graph, tmp_path):
    task = weft.Task(graph=graph, epochs=40, name="t")
    assert load_calibration(find_machine()) is None
    result = weft.run(task, device="cpu", progress=False, out=tmp_path / "run")
    learned = load_calibration(machine_with(CPU))
    (one,) = learned.observations
    assert one.measured == result.plan.measured["epoch_seconds"]
    assert dict(one.families) == pytest.approx(result.plan.cost["uncorrected"])
    first, then = result.plan.cost["epoch_seconds"], weft.plan(task, machine=machine_with(CPU)).run_seconds / 40
    assert abs(then - one.measured) < abs(first - one.measured)
    again = {"out": tmp_path / "run", "overwrite": True}  # the same place: it counts once
    weft.run(task, device="cpu", progress=False, **again)
    learn([tmp_path], machine_with(CPU))  # nor does learning from the folder count it again
    assert len(load_calibration(machine_with(CPU)).observations) == 1


@pytest.mark.usefixtures("dry_runs")
def test_members_of_a_sweep_teach_once_a_group(graph, tmp_path):
    weft.run(Sweep(graph, seed=range(3), epochs=40), device="cpu", progress=False, out=tmp_path / "run")
    learn([tmp_path], machine_with(CPU))
    assert len(load_calibration(machine_with(CPU)).observations) == 1


def test_a_few_epochs_teach_nothing(graph):
    weft.run(weft.Task(graph=graph, epochs=5), device="cpu", progress=False)
    assert not home().joinpath("machines").exists()


def test_a_home_that_cannot_be_written_to_is_no_harm(graph, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "file" / "home"))
    assert weft.run(weft.Task(graph=graph, epochs=40), device="cpu", progress=False).status == "finished"
    folder = machine_folder_with(tmp_path / "home", "not JSON", monkeypatch)
    assert weft.run(weft.Task(graph=graph, epochs=40), device="cpu", progress=False).status == "finished"
    assert (folder / "probe.json").read_text() == "not JSON"


def machine_folder_with(place, text, monkeypatch):
    """A home whose files about this machine all hold ``text``."""
    monkeypatch.setenv(HOME_VARIABLE, str(place))
    folder = machine_folder(machine_with(CPU).name)
    folder.mkdir(parents=True)
    for name in ("probe.json", "calibration.json"):
        (folder / name).write_text(text)
    return folder


# ---- room and graphs ---------------------------------------------------------------------------------


def test_room_is_what_is_free_less_a_margin(monkeypatch):
    machine = profile("cpu")
    free = room.room(CPU, machine)
    assert 0 < free < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert room.room(CPU, machine, 1000) == 1000
    assert room.room(CPU, machine, 1 << 60) <= 1.2 * free  # a budget makes no memory
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * 2**30)
    gpu = profile("h200").with_device(context_bytes=2**29)
    assert room.room(torch.device("cuda", 0), gpu) == int(0.95 * 12 * 2**30) + 2**29


def test_a_wall_leaves_as_much_as_the_budget_says_and_goes_again(monkeypatch):
    fraction = [1.0]
    total = SimpleNamespace(total_memory=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: total)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: fraction.append(share))
    gpu, machine = torch.device("cuda", 0), profile("h200").with_device(context_bytes=10)
    with suppress(KeyError), room.memory_cap(gpu, machine, 60):
        assert fraction == [1.0, 0.5]
        raise KeyError
    assert fraction == [1.0, 0.5, 1.0]
    with room.memory_cap(gpu, machine, None), room.memory_cap(CPU, machine, 60):
        assert len(fraction) == 3


def test_a_wall_around_plain_cuda_is_one_around_the_current_gpu(monkeypatch):
    walls = {0: 1.0, 3: 1.0}  # torch takes numbers, and refuses a device that has none
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=100))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", walls.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, gpu: walls.__setitem__(gpu, share))
    with room.memory_cap(torch.device("cuda"), profile("h200").with_device(context_bytes=10), 60):
        assert walls == {0: 1.0, 3: 0.5}
    assert walls == {0: 1.0, 3: 1.0}


def test_graphs_are_on_the_device_while_somebody_needs_them(graph):
    graphs = Graphs(CPU)
    mine, shape = weft.Task(graph=graph), weft.Task(graph="shape:cora?scale=0.1")
    for task in (mine, shape):
        check_trainable(task, graphs.summary(task))
    assert graphs.stats(shape).num_nodes == graphs.on_device(shape).num_nodes
    first = graphs.on_device(shape)
    graphs.let_go([shape])
    assert graphs.on_device(shape) is first
    graphs.let_go([mine])
    assert graphs.on_device(shape) is not first
    assert graphs.true_stats(mine).num_nodes == graph.num_nodes
