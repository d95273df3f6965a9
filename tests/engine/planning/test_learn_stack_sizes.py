"""The table of group sizes: measured on real groups, kept for the machine, and used by the grouping."""

from __future__ import annotations

import math
import sys
import types
from contextlib import contextmanager

import pytest
import torch

from weft.core.errors import SpecError
from weft.core.task import Task
from weft.engine import learning as throughput
from weft.engine import machine as machines
from weft.engine.home import THROUGHPUT, machine_folder, machine_name
from weft.engine.learning import Busy, learn_stack_sizes, measure_group, search
from weft.engine.machine import keep_throughput, load_throughput, machine_of, machine_with, this_machine
from weft.graph.generate import citation
from weft.planner.grouping.groups import group

CPU = torch.device("cpu")
HERE = machine_of(CPU)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def graph():
    return citation(60, 240, 6, 3, seed=1)


def task_on(graph, **settings) -> Task:
    return Task(graph=graph, name="a", hidden=4, epochs=50, **settings)


def test_groups_are_measured(graph):
    for tasks in (1, 3):
        ms, busy = measure_group(task_on(graph), graph, CPU, tasks, seconds=0.01)
        assert 0 < ms < math.inf
        assert busy is None


def test_the_search_fills_a_table_that_the_grouping_reads(graph, home):
    task = task_on(graph)
    table = search(task, graph, CPU, limit=4, seconds=0.01)
    assert (machine_folder(HERE) / THROUGHPUT).is_relative_to(home)
    assert load_throughput(HERE) == table
    size = table.group_size(task, graph.stats())
    assert 1 <= size <= 4
    tasks = [task.with_values(name=f"t{i}") for i in range(8)]
    plans = group(tasks, graph.stats(), "cpu", throughput=load_throughput(HERE))
    assert max(len(plan.members) for plan in plans) <= size
    assert f"throughput peaks at {size} tasks" in str(plans[0])


def test_searches_add_up(graph):
    search(task_on(graph), graph, CPU, limit=1, seconds=0.01)
    table = search(task_on(graph, model="gin"), graph, CPU, limit=1, seconds=0.01)
    assert len(table.table) == 2


def test_a_search_is_made_for_long_sweeps_and_once(graph, monkeypatch):
    made = []

    def noted(task, graph, device, limit, seconds=0.01):
        made.append((task.hidden, limit))
        return search(task, graph, device, 1, 0.01)

    monkeypatch.setattr(throughput, "search", noted)
    short = [task_on(graph).with_values(name=f"s{i}") for i in range(8)]
    assert learn_stack_sizes(short, lambda task: graph, CPU).table == {}
    long = [task_on(graph).with_values(name=f"l{i}", epochs=10_000_000, hidden=4 * (1 + i % 2)) for i in range(8)]
    assert len(learn_stack_sizes(long, lambda task: graph, CPU).table) == 1
    learn_stack_sizes(long, lambda task: graph, CPU)
    assert made == [(8, 8)]
    few = [task.with_values(model="gin") for task in long[:7]]
    learn_stack_sizes(few, lambda task: graph, CPU)
    assert len(made) == 1


@pytest.mark.parametrize("error", [SpecError("no"), PermissionError("no")])
def test_a_search_that_fails_ends_no_run(error, graph, monkeypatch):
    def failing(*args):
        raise error

    monkeypatch.setattr(throughput, "search", failing)
    long = [task_on(graph).with_values(name=f"l{i}", epochs=10_000_000) for i in range(8)]
    assert learn_stack_sizes(long, lambda task: graph, CPU).table == {}


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"table": 3}', '{"table": {"a": {"x": "y"}}}'])
def test_a_table_that_cannot_be_read_is_an_empty_one(text):
    path = machine_folder(HERE) / THROUGHPUT
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert load_throughput(HERE).table == {}
    keep_throughput(load_throughput(HERE))
    assert load_throughput(HERE).table == {}


def test_everything_of_a_machine_is_kept_under_one_name(graph):
    table = search(task_on(graph), graph, CPU, limit=1, seconds=0.01)
    assert table.machine == machine_of(CPU) == machine_name("cpu") == machine_with(CPU).name == this_machine().name


def test_memory_that_is_not_enough_is_a_group_that_does_not_run(graph, monkeypatch):
    def too_large(*args):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(throughput, "GroupRun", too_large)
    assert measure_group(task_on(graph), graph, CPU, 2) == (math.inf, None)


def test_the_driver_is_asked_while_a_group_trains(monkeypatch):
    answers = iter([0.2, 0.9, 0.9, 0.9])
    asked = throughput.threading.Event()

    def read():
        found = next(answers, 0.9)
        if found == 0.9:
            asked.set()
        return found

    monkeypatch.setattr(throughput, "_reader", lambda device: read)
    monkeypatch.setattr(throughput, "SAMPLE_SECONDS", 0.001)
    with Busy(CPU) as meter:
        assert asked.wait(10)
        while len(meter._samples) < 3:
            throughput.time.sleep(0.001)
    assert meter.share == 0.9


def test_nvml_is_optional(monkeypatch):
    assert throughput._reader(CPU) is None
    broken = types.ModuleType("pynvml")
    broken.nvmlInit = lambda: 1 / 0
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    assert throughput._reader(torch.device("cuda")) is None


def test_a_table_is_changed_under_a_lock(graph, home, monkeypatch):
    """A table that another process keeps while this one waits for the lock is not lost."""
    task, other = task_on(graph), task_on(graph, model="gat", heads=2)
    entered = machines.locked

    @contextmanager
    def late(path):
        keep_throughput(load_throughput(HERE).with_measured(other, graph.stats(), {1: 2.0}, {}))
        with entered(path):
            yield

    monkeypatch.setattr(machines, "locked", late)
    search(task, graph, CPU, limit=2, seconds=0.01)
    table = load_throughput(HERE)
    assert table.group_size(task, graph.stats()) is not None
    assert table.group_size(other, graph.stats()) == 1
