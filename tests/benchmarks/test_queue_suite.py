"""The paper's queues through the server, on tiny graphs; the simulator beside them; its fit to pairs."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from benchmarks.queue_runs import server as queue_server
from benchmarks.queue_runs import tables as queue_tables
from benchmarks.queue_runs.server import DeviceSampler, QueueServer, peak_bytes
from benchmarks.queue_runs.simulations import (
    Pair,
    add_simulations,
    alone,
    fit,
    side_by_side,
    starts_beside,
    together,
)
from benchmarks.suites import queues
from weft.sched.queue_state import QueuedTask
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
    assert len(pairs) == 1
    assert (
        set(pairs[0]["trained"]) == set(pairs[0]["ends"]) == set(pairs[0]["tasks"]) <= set(cells["pipeswitch"]["took"])
    )
    assert cells["pyg"]["start_seconds"] > 0
    assert "| makespan: BMC / Weft | > 1 |" in capsys.readouterr().out


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
        lost = server.supervisor.state.counters
        server._until(lambda: lost["workers_lost"] == 2 and len(server._ready()) == 3, 60.0, "for other workers")
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


@pytest.mark.parametrize(("cells", "count"), [(CELLS, 19), (NEWEST, 25), (AGAIN, 25)], ids=["first", "newest", "again"])
def test_the_simulator_is_near_every_recorded_makespan(cells, count):
    cells = [dict(cell) for cell in cells]
    add_simulations(cells)
    found = [cell["simulator_error"] for cell in cells if cell["mode"] in queue_tables.SIMULATED]
    assert len(found) == count
    assert max(map(abs, found)) < 0.1


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
