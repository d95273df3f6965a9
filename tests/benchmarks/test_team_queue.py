"""A team's queue on tiny graphs: jobs become tasks, arrive in turn, and end in every mode."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.queue_runs.team import QUEUE, arrivals, read_jobs, shapes_of
from benchmarks.suites import team_queue
from weft.core.task import Task
from weft.sched.simulator import SimulatedGroup, Simulation, TaskRun

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

JOBS = [
    {"name": "sweep", "user": "a", "submit_at_s": 0, "graph": "shape:cora", "epochs": 3,
     "sweep": {"model": ["gcn", "sage"], "hidden": 8, "seed": [0, 1]}},
    {"name": "sampled", "user": "b", "submit_at_s": 0.2, "graph": "shape:cora", "epochs": 1,
     "sweep": {"model": "sage", "hidden": 8, "mode": "sampled", "fanout": [3, 2], "batch": 16, "lr": [0.01, 0.02]}},
    {"name": "module", "user": "a", "submit_at_s": 0.4, "graph": "shape:cora", "epochs": 2, "seeds": [0, 1],
     "module": "torch_geometric.nn.GCN", "module_args": {"hidden_channels": 8, "num_layers": 2}},
    {"name": "relations", "user": "b", "submit_at_s": 0.5, "graph": "shape:am", "epochs": 2,
     "task": {"model": "rgcn", "hidden": 4, "bases": 3}},
    {"name": "ask", "user": "a", "submit_at_s": 0.5,
     "infer": {"of": "sweep", "nodes": 4, "every_s": 0.2, "times": 3, "latency_target_s": 60.0}},
]  # fmt: skip


def test_the_queue_has_24_jobs_whose_tasks_can_be_submitted(tmp_path):
    jobs = read_jobs(QUEUE)
    assert len(jobs) == 24
    found = arrivals(jobs, {shape: tmp_path / shape for shape in shapes_of(jobs)})
    assert len([one for one in found if not one.of]) == 98
    assert len([one for one in found if one.of]) == 80
    assert [one.at for one in found] == sorted(one.at for one in found)
    for one in found:
        json.dumps(dict(one.settings))
        assert Task.from_dict(dict(one.settings)).graph.startswith(str(tmp_path))


def test_some_jobs_and_other_epochs(tmp_path):
    jobs = read_jobs(QUEUE, ["stacked-arxiv", "infer-1"])
    found = arrivals(jobs, {"ogbn-arxiv": tmp_path}, epochs=2)
    assert {one.job for one in found} == {"stacked-arxiv", "infer-1"}
    assert {one.settings["epochs"] for one in found} == {2}
    asked = [one for one in found if one.of]
    assert {one.of for one in asked} == {"stacked-arxiv/00"}
    assert [one.at for one in asked] == [12 + second for second in range(20)]


def test_a_job_ends_with_its_last_task_and_inference_is_counted_apart(tmp_path):
    found = arrivals(JOBS, {"cora": tmp_path, "am": tmp_path})
    runs = [TaskRun(one.label, one.label, one.at, one.at + 1, one.at + 2 + n) for n, one in enumerate(found)]
    groups = [SimulatedGroup(run.id, "d", 0, (run.id,), 5, run.start, run.end) for run in runs]
    figures = team_queue.figures(Simulation("backfill", runs, groups), found, {"utilisation": None})
    assert (figures["jobs"], figures["tasks"], figures["answers"]) == (4, 9, 3)
    assert figures["mean_wait"] == pytest.approx(1.0)
    assert figures["makespan"] == max(run.end for run in runs if not run.id.startswith("ask"))
    assert figures["answers_in_time"] == 1.0
    lost = team_queue.figures(Simulation("backfill", runs[1:], groups[1:]), found, {})
    assert (lost["jobs"], lost["tasks"]) == (3, 8)


@pytest.mark.long
def test_a_queue_in_several_modes(tmp_path, monkeypatch, capsys):
    file, out = tmp_path / "jobs.json", tmp_path / "team_queue.json"
    file.write_text(json.dumps({"jobs": JOBS}))
    command = ["team_queue", "--device", "cpu", "--workers", "2", "--nodes", "1000", "--file", str(file)]
    command += ["--budget-gib", "2", "--reserved-gib", "0.1", "--modes", "backfill,unfused,pyg-mps", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    team_queue.main()
    cells = {cell["mode"]: cell for cell in json.loads(out.read_text())["cells"]}
    assert set(cells) == {"backfill", "unfused", "pyg-mps"}
    for cell in cells.values():
        assert cell["status"] == "ok", cell
        assert (cell["jobs"], cell["tasks"], cell["answers"]) == (4, 9, 3)
        assert (cell["out_of_memory"], cell["failed"]) == (0, {})
    assert cells["unfused"]["groups"] == 9
    assert cells["unfused"]["largest_group"] == 1
    assert cells["backfill"]["largest_group"] > 1
    assert "| makespan: nothing fused / Weft | >= 1.5 |" in capsys.readouterr().out


@pytest.mark.long
def test_overheads_are_counted_in_epochs_of_the_queue(tmp_path, monkeypatch, capsys):
    from benchmarks.suites import queue_epochs

    out = tmp_path / "queue_epochs.json"
    command = ["queue_epochs", "--quick", "--device", "cpu", "--queues", "gcn", "--workers", "2", "--budget-gib", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--reserved-gib", "0.1", "--out", str(out)])
    queue_epochs.main()
    cells = json.loads(out.read_text())["cells"]
    assert [(cell["status"], cell["epochs"], cell["done"], cell["failed"]) for cell in cells] == [
        ("ok", 2, 3, {}), ("ok", 6, 3, {}),
    ]  # fmt: skip
    assert "| starts and scheduling, epochs | planning, epochs |" in capsys.readouterr().out


def test_makespans_of_two_lengths_give_an_epoch_and_what_comes_on_top():
    from benchmarks.harness.results import Results
    from benchmarks.report import runs

    def cell(epochs, makespan):
        figures = {"makespan": makespan, "mean_jct": 1.0, "mean_queuing": 0.5, "planning_seconds": 1.0}
        about = {"queue": "gcn", "workers": 6, "mode": "backfill", "epochs": epochs, "status": "ok", "run": 0}
        return {**about, **figures, "failed": {}, "out_of_memory": 0, "utilisation": 0.9}

    text = runs.queue_epochs(
        Results("queue_epochs", [{"date": "2026-11-18", "device": "d"}], [cell(20, 4), cell(200, 22)])
    )
    assert "| gcn | 6 | `backfill` | 22.0 / 1.00 / 0.500 | 90 % | 100 ms | 20.0 | 10.0 | 0 |" in text
    skipped = {
        "queue": "gcn",
        "workers": 2,
        "mode": "backfill",
        "epochs": 200,
        "status": "skipped",
        "reason": "no time",
    }
    cells = [cell(20, 4), cell(200, 3.9), {**cell(20, 4), "workers": 2}, {**skipped, "run": 0}]
    text = runs.queue_epochs(Results("queue_epochs", [{"date": "2026-11-18", "device": "d"}], cells))
    assert "| gcn | 6 | `backfill` | no figure: 200 epochs took no longer than 20 |" in text
    assert "| gcn | 2 | `backfill` | no figure: no time |" in text


def test_only_kinds_of_single_tasks_are_warmed_up(tmp_path):
    found = [one for one in arrivals(JOBS, {"cora": tmp_path, "am": tmp_path}, 1) if not one.of]
    kinds = team_queue.kinds_of(found)
    assert [one.label for one in kinds] == ["sweep/00", "sweep/02", "sampled/00", "module/00", "relations/00"]
    assert {one.at for one in kinds} == {0.0}
