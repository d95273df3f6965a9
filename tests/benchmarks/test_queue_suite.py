"""The paper's queues through the server, on tiny graphs; the fit of the simulator to pairs; the charts."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.queue_runs import queue_server, queue_tables, training_times
from benchmarks.queue_runs.cdf_plot import cdf_svg
from benchmarks.queue_runs.device_sampler import DeviceSampler
from benchmarks.queue_runs.interference_fit import Fit, Pair, alone, fit, side_by_side, together
from benchmarks.queue_runs.queue_plots import write_plots
from benchmarks.queue_runs.queue_server import QueueServer, peak_bytes
from benchmarks.queue_runs.queue_simulations import (
    add_simulations,
    launches_of,
    measured_alone,
    simulated,
    starts_beside,
)
from benchmarks.queue_runs.start_parts import PARTS
from benchmarks.suites import queues
from weft.sched.queue_state import DeviceState, QueuedTask
from weft.sched.simulator import SimulatedGroup

RESULTS = Path(queues.__file__).parents[1] / "results"
NEWEST, AGAIN = (json.loads((RESULTS / name).read_text())["cells"] for name in ("queues.json", "queues_again.json"))
CELLS = json.loads((Path(__file__).parents[1] / "sched" / "recorded_run.json").read_text())["cells"]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def test_a_queue_in_several_modes(tmp_path, monkeypatch, capsys):
    out = tmp_path / "queues.json"
    command = ["queues", "--quick", "--device", "cpu", "--queues", "gcn", "--workers", "2", "--budget-gib", "2",
               "--reserved-gib", "0.1", "--modes", "backfill,bmc,pyg", "--out", str(out)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    queues.main()
    data = json.loads(out.read_text())
    cells = {cell["mode"]: cell for cell in data["cells"]}
    pairs = cells.pop("pairs")["pairs"]
    assert set(cells) == {"pipeswitch", "backfill", "bmc", "pyg"}
    for cell in cells.values():
        assert cell["status"] == "ok", cell
        assert (cell["done"], cell["out_of_memory"], cell["failed"]) == (4, 0, {})
        assert 0 <= cell["mean_queuing"] < cell["mean_jct"] <= cell["makespan"]
        assert cell["p95_jct"] == pytest.approx(max(end for _, end in cell["tasks"].values()), abs=1e-3)
    for mode in ("pipeswitch", "backfill", "bmc"):
        assert 0 < cells[mode]["peak_bytes"] <= cells[mode]["budget_bytes"] == 2 << 30
        assert cells[mode]["simulated_makespan"] > 0
    assert abs(cells["pipeswitch"]["replayed_error"]) < 0.05  # it is made of the same seconds
    for took in (one for mode in ("pipeswitch", "backfill", "bmc") for one in cells[mode]["took"].values()):
        parts = [took[part] for part in PARTS]
        assert all(part >= 0 for part in parts)
        assert sum(parts) <= took["seconds"] + 0.001
    assert len(pairs) == 1
    assert (
        set(pairs[0]["trained"]) == set(pairs[0]["ends"]) == set(pairs[0]["tasks"]) <= set(cells["pipeswitch"]["took"])
    )
    assert cells["pyg"]["start_seconds"] > 0
    assert "| gcn   | backfill" in capsys.readouterr().out
    charts = [tmp_path / f"queues-gcn-{kind}.svg" for kind in ("cdf", "gantt")]
    texts = [chart.read_text() for chart in charts]
    for chart in charts:
        ElementTree.parse(chart)
        chart.unlink()
    assert write_plots(data["cells"], out) == charts  # the file has all that they show
    assert [chart.read_text() for chart in charts] == texts


def test_charts_name_workers_and_draw_the_budget_where_a_side_had_none(tmp_path):
    mix = [one for one in NEWEST if one["queue"] == "mix" and one["mode"] in ("pyg", "backfill")]
    chart = write_plots(mix, tmp_path / "queues.json")[1].read_text()
    assert ">worker 5<" in chart
    assert ">device 0<" not in chart
    assert chart.count(">26.0 GiB<") == 2
    assert ">0 B<" not in chart


def cell(mode, makespan, seconds, **more):
    took = {name: {"seconds": s, "trained_seconds": s, "cpu_seconds": s, "waited_seconds": 0.0}
            for name, s in zip("ab", seconds, strict=True)}  # fmt: skip
    about = {"queue": "gcn", "mode": mode, "status": "ok", "failed": {}, "background": 0.0, "cores": 2}
    return {**about, "makespan": makespan, "took": took, **more}


def test_every_queue_is_warmed_up_with_its_own_tasks(tmp_path):
    task = {"graph": "demo", "model": "gcn", "hidden": 4, "epochs": 1}
    with QueueServer(tmp_path, "cpu", 1, 4 << 30, 1 << 30) as server:
        trained = [server.warm_up([{**task, "model": model}], 60.0) for model in ("gcn", "sage")]
    assert trained == [1, 1]
    found = sorted((tmp_path / "warm").glob("*/result.json"))
    assert [json.loads(path.read_text())["task"]["model"] for path in found] == ["gcn", "sage"]


def test_warming_up_does_not_wait_for_workers_that_are_lost_or_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(queue_server, "WARM_GRACE", 1.0)
    task = {"graph": "demo", "model": "gcn", "hidden": 4, "epochs": 1}
    with QueueServer(tmp_path, "cpu", 2, 4 << 30, 1 << 30) as server:
        first, second = (one for name, one in server.supervisor.pool.workers.items() if name != queue_server.PLANNER)
        os.kill(first.pid, signal.SIGKILL)
        os.kill(second.pid, signal.SIGSTOP)
        begin = time.monotonic()
        server.warm_up([task, task], 2.0)
        assert time.monotonic() - begin < 15
        lost = server.supervisor.counters
        server._until(lambda: lost.workers_lost == 2 and len(server._ready()) == 3, 60.0, "for other workers")
        assert server.warm_up([task], 60.0) == 2
        assert server.run("backfill", {"a": task}).outcome.tasks


def test_a_start_is_what_it_took_in_the_other_runs():
    def run(mode, start, **more):
        took = {name: {"seconds": s + 1.0, "trained_seconds": 1.0} for name, s in start.items()}
        return {"mode": mode, "took": took, **more}

    found = {
        "pipeswitch": run("pipeswitch", {"a": 0.7, "b": 0.2}),
        "lmcf": run("lmcf", {"a": 0.2, "b": 5.0}, tried_again={"b": "its worker ended"}),
        "bmc": run("bmc", {"a": 0.3, "b": 0.4}),
        "pyg": {"mode": "pyg"},
    }
    assert starts_beside("backfill", found) == {"a": pytest.approx(0.3), "b": pytest.approx(0.3)}
    assert starts_beside("bmc", found) == {"a": pytest.approx(0.45), "b": pytest.approx(0.2)}


def test_kernels_are_as_long_as_the_training_says():
    told = QueuedTask("00-gcn-4-cora", 1, 3.0, start_seconds=1.0, utilisation=2 / 3)
    took = {told.id: {"seconds": 5.0, "trained_seconds": 4.0}}
    base = {"predicted": [told.to_dict()], "took": took, "makespan": 5.0, "device": {"name": "cuda:0"}}
    (found,) = measured_alone(base, {told.id: 0.5})
    assert launches_of(told.id) == 42
    assert launches_of("a") == 0
    assert found.turn_seconds == pytest.approx(4.0 / 42), "by rule of thumb, of a file that says nothing of kernels"
    assert (found.start_seconds, found.work) == (pytest.approx(0.5), pytest.approx(4.0))
    base["predicted"] = [replace(told, turn_seconds=0.1).to_dict()]
    assert measured_alone(base)[0].turn_seconds == pytest.approx(0.2), "twice as long as predicted"


def test_turns_explain_the_recorded_trainings_better_than_even_sharing():
    found = {}
    for _, model, miss in training_times.misses(CELLS):
        found.setdefault(model, []).append(miss)
    means = {model: training_times.mean_miss(rows)[0] for model, rows in found.items()}
    assert len(found[training_times.BY_TURNS]) == 380
    assert means[training_times.EVEN] == pytest.approx(0.490, abs=0.001)
    assert means[training_times.BY_SECONDS] == pytest.approx(0.213, abs=0.001)
    assert means[training_times.BY_TURNS] == pytest.approx(0.184, abs=0.001)


def test_turns_explain_the_newest_run_better_too():
    """Which nothing was chosen by."""
    found = {}
    for _, model, miss in training_times.misses(NEWEST):
        found.setdefault(model, []).append(miss)
    means = {model: training_times.mean_miss(rows)[0] for model, rows in found.items()}
    assert means[training_times.BY_TURNS] < 0.5 * means[training_times.EVEN]


@pytest.mark.parametrize(("cells", "count"), [(CELLS, 19), (NEWEST, 25), (AGAIN, 25)], ids=["first", "newest", "again"])
def test_the_simulator_is_near_every_recorded_makespan(cells, count):
    cells = [dict(cell) for cell in cells]
    add_simulations(cells)
    found = [cell["simulator_error"] for cell in cells if cell["mode"] in queue_tables.SIMULATED]
    assert len(found) == count
    assert max(map(abs, found)) < 0.1


def test_the_run_before_a_capture_brings_the_simulator_nearer():
    """In the run that was made after it was counted."""

    def mean_error(cells):
        add_simulations(cells)
        found = [abs(cell["simulator_error"]) for cell in cells if cell["mode"] in queue_tables.SIMULATED]
        return sum(found) / len(found)

    with_it, without = (json.loads(json.dumps(AGAIN)) for _ in range(2))
    for one in without:
        for took in one.get("took", {}).values():
            del took["epoch_seconds"]
    assert mean_error(with_it) == pytest.approx(0.0207, abs=0.0005)
    assert mean_error(without) == pytest.approx(0.0249, abs=0.0005)


def test_epochs_by_queue():
    assert queues.epochs_of("gcn=40,gat=10") == {"gcn": 40, "gat": 10}
    assert set(queues.epochs_of("7").values()) == {7}
    assert set(queues.epochs_of(queues.EPOCHS)) == set(queues.QUEUES)


def test_the_simulator_goes_by_what_the_file_has():
    predicted = [QueuedTask(name, 1, 9.0).to_dict() for name in "ab"]
    device = DeviceState("cpu", 100, workers=2).to_dict()
    base = cell("pipeswitch", 10.0, (6.0, 4.0), predicted=predicted, device=device)
    beside = {"tasks": ["a", "b"], "ends": {"a": 6.0, "b": 4.0}, "background": 0.0}
    cells = [base, cell("mps", 6.0, (6.0, 4.0)), {"queue": "gcn", "mode": "pairs", "status": "ok", "pairs": [beside]}]
    add_simulations(cells)
    assert base["simulator_error"] == pytest.approx(0.0)
    assert cells[1]["simulated_makespan"] == pytest.approx(6.0)  # one core each: they do not slow each other down
    assert cells[1]["replayed_error"] == pytest.approx(0.0)
    assert "simulated_makespan" not in cells[2]


def test_on_a_gpu_the_epochs_of_pairs_tell_the_interference():
    predicted = [QueuedTask(name, 1, 9.0).to_dict() for name in "ab"]
    device = DeviceState("cuda:0", 100, workers=2).to_dict()
    base = cell("pipeswitch", 10.0, (5.0, 5.0), predicted=predicted, device=device)
    for took in base["took"].values():
        took["trained_seconds"] = 4.0
    slow_start = {"tasks": ["a", "b"], "ends": {"a": 5.0, "b": 7.0}, "background": 0.9}
    found = []
    for trained in ({"trained": {"a": 4.0, "b": 4.0}}, {}):
        pairs = {"queue": "gcn", "mode": "pairs", "status": "ok", "pairs": [slow_start | trained]}
        cells = [base, cell("mps", 5.0, (5.0, 5.0)), pairs]
        add_simulations(cells)
        assert cells[1]["replayed_error"] == pytest.approx(0.0)
        found.append(cells[1]["simulated_makespan"])
    assert found[0] == pytest.approx(5.0)  # no epoch took longer than alone
    assert found[1] > 5.5  # a file of before that has ends alone: the late start counts as interference


def test_the_run_before_a_capture_waits_for_the_device_as_epochs_do():
    predicted = [QueuedTask(name, 1, 9.0).to_dict() for name in "ab"]
    found = []
    for epoch in (0.0, 0.5, 9.0):
        base = cell(
            "pipeswitch", 4.0, (2.0, 2.0), predicted=predicted, device=DeviceState("cuda:0", 100, workers=2).to_dict()
        )
        for took in base["took"].values():
            took |= {"trained_seconds": 1.0, "epoch_seconds": epoch}
        starts = {"a": 1.0, "b": 1.0}
        found.append(
            simulated("mps", cell("mps", 3.0, (3.0, 3.0)), base, Fit(0.0, 0.0, 1), starts)["simulated_makespan"]
        )
    assert found == [pytest.approx(3.0), pytest.approx(3.5), pytest.approx(4.0)], "no more than a start takes"


def test_contention_is_found_again():
    tasks = [alone(QueuedTask(name, 1, 1), seconds, busy) for name, seconds, busy in
             (("a", 10.0, 9.0), ("b", 8.0, 7.5), ("c", 4.0, 1.0), ("d", 4.0, 1.2))]  # fmt: skip
    pairs = []
    for two in ((tasks[0], tasks[1]), (tasks[2], tasks[3])):
        ends = {run.id: run.end for run in together(two, 0.3).tasks}
        pairs.append(Pair(two, ends))
    found = fit(pairs)
    assert found.contention == pytest.approx(0.3, abs=0.05)
    assert found.error < 0.02
    assert fit([]).pairs == 0


def test_a_tiny_task_that_waits_behind_a_large_one_says_little_of_the_queue():
    tiny, large, other = (alone(QueuedTask(name, 1, 1), work + 0.1, work) for name, work in
                          (("t", 0.03), ("l", 0.45), ("o", 0.45)))  # fmt: skip
    beside = side_by_side((tiny, large), {"t": 0.22, "l": 0.56}, {"t": 0.12, "l": 0.46})  # 4 times and 1.02 times
    level = side_by_side((large, other), {"l": 1.0, "o": 1.0}, {"l": 0.9, "o": 0.9})
    found = fit([beside, level])
    assert found.share == 1.0
    assert found.contention < 0.1


def test_a_task_alone_counts_its_start_as_idle():
    task = alone(QueuedTask("a", 1, 5.0, join_key="k"), seconds=4.0, busy_seconds=2.0, gap_seconds=1.0)
    assert (task.seconds, task.utilisation, task.joinable) == (5.0, 0.4, False)
    assert (task.start_seconds, task.demand) == (3.0, 1.0)


def test_peak_bytes_of_groups_that_overlap():
    def group(name, bytes, start, end):
        return SimulatedGroup(name, "d", 0, (name,), bytes, start, end)

    groups = [group("a", 5, 0, 2), group("b", 3, 1, 3), group("c", 4, 2, 4)]
    assert peak_bytes(groups) == 8  # at 2 the first has ended before the third begins
    assert peak_bytes([]) == 0


def test_without_nvml_nothing_is_claimed():
    with DeviceSampler(None) as sampler:
        pass
    assert sampler.figures(0.0, 1e12) == {"utilisation": None, "device_peak_bytes": None}


def test_a_cumulative_chart():
    text = cdf_svg("queue <a>", {"one": [0.1, 1.0, 20.0], "two & three": [3.0], "none": []})
    root = ElementTree.fromstring(text)
    lines = [node for node in root.iter() if node.get("class") == "line"]
    assert len(lines) == 3
