"""The harness survives failing cells, keeps to its budget, and every benchmark runs on a tiny graph."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from argparse import Namespace

import pytest
import torch

import weft
from benchmarks.baselines.cusparse import edge_values
from benchmarks.baselines.epochs import Setting
from benchmarks.harness.graphs import fresh, row_normalised
from benchmarks.harness.recorder import NotHere, Recorder, find
from benchmarks.harness.results import Results
from benchmarks.harness.timing import Timing, compulsory_bytes, gathered_bytes
from benchmarks.report import runs, training
from benchmarks.suites import accuracy, cpu, cpu_ops, epoch, spmm
from weft.graph.generate import citation

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def graph():
    return citation(80, 400, 10, 3, seed=2, density=0.3, name="tiny")


def options(tmp_path, **more) -> Namespace:
    return Namespace(out=tmp_path / "out.json", budget_seconds=math.inf, device="cpu", scale=1.0, **more)


def test_a_failing_cell_is_recorded_and_the_next_one_runs(tmp_path):
    recorder = Recorder("try", options(tmp_path))
    recorder.cell({"case": 1}, lambda: {"ms": 1 / 0})
    recorder.cell({"case": 2}, lambda: {"ms": 2.0})
    saved = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert [cell["status"] for cell in saved] == ["failed", "ok"]
    assert "ZeroDivisionError" in saved[0]["error"]
    assert find(saved, case=2)["ms"] == 2.0
    assert find(saved, case=1) is None


def test_cells_after_the_budget_are_skipped(tmp_path):
    args = options(tmp_path)
    args.budget_seconds = 0.0
    recorder = Recorder("try", args)
    assert recorder.cell({"case": 1}, lambda: {"ms": 1.0})["status"] == "skipped"


def interrupted_by_hand():
    raise KeyboardInterrupt


def terminated():
    os.kill(os.getpid(), signal.SIGTERM)
    return {"ms": 1.0}


def terminated_in_a_run():
    """As ``timeout`` does it while Weft trains, which saves what it has and raises an exception of its own."""
    ending = lambda event: os.kill(os.getpid(), signal.SIGTERM) if event.kind == "progress" else None  # noqa: E731
    task = weft.Task(graph="demo", model="gcn", epochs=100_000)
    return {"ms": weft.run(task, device="cpu", progress=False, on_event=ending).metrics["seconds_per_epoch"]}


@pytest.mark.parametrize("work", [interrupted_by_hand, terminated, terminated_in_a_run])
def test_an_interrupted_benchmark_skips_the_rest_and_goes_on_to_its_table(work, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    recorder = Recorder("try", options(tmp_path))
    recorder.cell({"case": 1}, lambda: {"ms": 1.0})
    recorder.cell({"case": 2}, work)
    recorder.cell({"case": 3}, lambda: {"ms": 3.0})
    assert recorder.prepare("graph", lambda: 1) is None
    saved = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert [cell["status"] for cell in saved] == ["ok", "skipped", "skipped"]
    assert saved[2]["reason"] == "the benchmark was interrupted"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_cell_that_this_machine_cannot_run_is_skipped(tmp_path):
    def work():
        raise NotHere("no such device")

    cell = Recorder("try", options(tmp_path)).cell({"case": 1}, work)
    assert (cell["status"], cell["reason"]) == ("skipped", "no such device")


def test_cells_that_went_well_are_not_run_again(tmp_path):
    args = options(tmp_path)
    first = Recorder("try", args)
    first.cell({"case": 1}, lambda: {"ms": 1.0})
    first.cell({"case": 2}, lambda: {"ms": 1 / 0})
    args.resume = True
    second = Recorder("try", args)
    assert second.cell({"case": 1}, lambda: {"ms": 9.0})["ms"] == 1.0
    assert second.cell({"case": 2}, lambda: {"ms": 2.0})["ms"] == 2.0
    saved = json.loads(args.out.read_text())["cells"]
    assert [cell["ms"] for cell in saved] == [1.0, 2.0]


def test_timing_summarises():
    timing = Timing.of([3.0, 1.0, 2.0])
    assert (timing.ms, timing.best, timing.worst, timing.repeats) == (2.0, 1.0, 3.0, 3)
    assert timing.scaled(0.5).ms == 1.0


def test_bytes_of_spmm(graph):
    adj = graph.adj
    structure = 4 * (81 + adj.num_edges)
    assert compulsory_bytes(adj, 8, 0) == structure + 4 * 8 * 160
    assert gathered_bytes(adj, 8, 4) == structure + 4 + 4 * 8 * (adj.num_edges + 80)


@pytest.mark.parametrize(
    ("side", "tasks"), [*((side, None) for side in spmm.SIDES), *((side, 3) for side in spmm.SIDES_OF_TASKS)]
)
def test_spmm_sides_are_exact(side, tasks, graph):
    matrix = graph.adj.gcn()
    inputs = spmm.Inputs(matrix, edge_values(matrix), 5, tasks)
    found = spmm.measure_cell(side, inputs, None, 0.01)
    assert found["error"] < 1e-6
    assert found["ms"] > 0
    if tasks:
        assert found["ms_a_task"] == pytest.approx(found["ms"] / tasks, abs=1e-4)


@pytest.mark.parametrize(("side", "tasks"), [("cusparse", None), ("wide", 3), ("separate", 3)])
def test_prepared_products_write_every_task(side, tasks, graph, monkeypatch):
    """With torch's product in place of cuSPARSE's, which needs a GPU."""

    class Product:
        def __init__(self, handle, indptr, indices, values, x, out, algorithm):
            self.matrix = torch.sparse_csr_tensor(indptr, indices, values, (80, 80))
            self.x, self.out = x, out
            assert x.is_contiguous()
            assert out.is_contiguous()

        def __call__(self):
            self.out.copy_(torch.sparse.mm(self.matrix, self.x))

    monkeypatch.setattr(spmm.cusparse, "Product", Product)
    matrix = graph.adj.gcn()
    found = spmm.measure_cell(side, spmm.Inputs(matrix, edge_values(matrix), 5, tasks), object(), 0.01)
    assert found["error"] < 1e-6
    assert set(found["every_algorithm_ms"]) == set(spmm.cusparse.ALGORITHMS)


def test_a_task_in_the_wrong_place_is_noticed(graph):
    matrix = graph.adj.gcn()
    inputs = spmm.Inputs(matrix, edge_values(matrix), 5, 2)
    right = weft.ops.spmm(matrix, inputs.xs[-1])
    assert inputs.error(right) < 1e-6
    assert inputs.error(right.flip(0)) > 0.1


def test_spmm_of_many_tasks_from_the_shell(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    command = ["spmm", "--device", "cpu", "--scale", "0.003", "--shapes", "arxiv", "--tasks", "2", "--features", "4",
               "--cell-seconds", "0.01", "--out", str(out)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", command)
    spmm.main()
    printed = capsys.readouterr().out
    assert "T of cuSPARSE" in printed
    assert "device copy:" in printed
    assert json.loads(out.read_text())["benchmark"] == "multi_kernels"


def test_operators_of_a_cpu_from_the_shell(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cpu_ops, "OPERATORS", {name: cpu_ops.OPERATORS[name] for name in ("spmm", "sddmm")})
    command = ["cpu_ops", "--graphs", "cora", "--rounds", "1", "--data", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    cpu_ops.main()
    assert "| cora | sddmm | 64 |" in capsys.readouterr().out


def test_spmm_in_both_orders(graph, tmp_path):
    """cuSPARSE's time is set against both; the summary goes by what a plan would take."""
    recorder = Recorder("try", options(tmp_path))
    matrix = graph.adj.gcn()
    forms = spmm.row_forms(recorder, "tiny", matrix, "both")
    assert list(forms) == ["length", "cluster"]
    assert forms["length"] is matrix
    assert not matrix.nodes
    assert recorder.about["row_orders"]["tiny"]["seconds"] > 0
    assert list(spmm.row_forms(recorder, "tiny", matrix, "length")) == ["length"]
    assert list(spmm.row_forms(recorder, "tiny", matrix, "cluster")) == ["cluster"]
    assert spmm.planned_order(matrix, 64, 16) == "length"
    key = {"shape": "tiny", "features": 5, "status": "ok", "run": 0, "gathered_tb_s": 1.0}
    cells = [
        {**key, "side": "cusparse", "ms": 4.0},
        {**key, "side": "scales", "rows": "length", "ms": 2.0, "planned": False},
        {**key, "side": "scales", "rows": "cluster", "ms": 1.0, "planned": True},
        {**key, "side": "weights", "rows": "length", "status": "failed"},
    ]
    printed = training.spmm(Results("spmm", [{}], cells))
    assert "| tiny | 5 | 4.00 | 1.00, by length 2.00 | 4.00x |" in printed
    assert "Geometric mean 4.00x, worst 4.00x." in printed


def test_spmm_notices_what_was_not_written(graph):
    matrix = graph.adj.gcn()
    inputs = spmm.Inputs(matrix, edge_values(matrix), 5)
    out = torch.zeros(80, 5)
    out[3, 2] = math.nan
    assert math.isnan(inputs.error(out))
    assert inputs.error(torch.zeros(80, 5)) == pytest.approx(1.0)


@pytest.mark.parametrize("side", ["weft", "weft-every-step", "pyg", "cusparse", "captured", "cusparse-captured"])
def test_epoch_sides_run(side, graph):
    pytest.importorskip("torch_geometric")
    graph = fresh(graph)
    found = epoch.measure(side, "gcn", graph, Setting(layers=2, hidden=4), "source")
    assert found["ms"] > 0
    assert not graph.adj._derived.get("gcn"), "a cell must not leave derived matrices for the next one"
    if side.endswith("captured"):
        assert found["captured"] is False
        assert "a CPU has no CUDA graphs" in found["why_not"]
    assert "eager" not in found


def test_a_side_that_is_left_out_says_why(tmp_path, graph, monkeypatch):
    monkeypatch.setattr(epoch, "make_graph", lambda *_: graph)
    monkeypatch.setattr(epoch, "LARGE", 10)
    recorder = Recorder("epoch", options(tmp_path))
    sides = "weft-every-step,captured"
    args = Namespace(scale=1.0, hidden=4, sides=sides, models="gat", edge_order="source", compile_large=False)
    epoch.run_shape(recorder, "tiny", args)
    reasons = {cell["side"]: cell.get("reason", "") for cell in recorder.cells}
    assert set(reasons) == set(sides.split(","))
    assert "nothing is computed once" in reasons["weft-every-step"]
    assert "--compile-large" in reasons["captured"]


def test_row_normalised_features_sum_to_one(graph):
    x = row_normalised(graph).x.to_dense()
    sums = x.sum(1)
    assert torch.all((sums - 1).abs().lt(1e-5) | sums.eq(0))


@pytest.mark.parametrize("side", ["weft", "pyg"])
def test_cpu_training_runs(side, graph):
    pytest.importorskip("torch_geometric")
    task = cpu.paper_task(graph, epochs=3, eval_every=1)
    found = cpu.measure(side, graph, graph.x.to_dense(), graph.edge_index(), task)
    assert 0.0 <= found["test_accuracy"] <= 1.0


@pytest.mark.parametrize("model", list(accuracy.SETTINGS))
def test_accuracy_trains_both_sides(model, graph):
    pytest.importorskip("torch_geometric")
    settings = accuracy.settings_of(model, 2)
    inputs = (graph.x.to_dense(), graph.edge_index())
    for side in accuracy.SIDES:
        found = accuracy.train(side, graph, model, settings, 0, inputs)
        assert found["epochs"] == 2


def test_accuracy_row_counts_standard_errors():
    tests = {"weft": [0.8, 0.82], "pyg": [0.8, 0.82]}
    cells = [
        {"graph": "g", "model": "gcn", "side": side, "seed": seed, "status": "ok", "test": value}
        for side, values in tests.items()
        for seed, value in enumerate(values)
    ]
    found = runs.compared(Results("accuracy", [{}], cells), "g", "gcn")
    assert found["weft"][0] == pytest.approx(81.0)
    assert found["apart"] == 0.0
