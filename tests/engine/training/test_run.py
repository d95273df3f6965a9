"""weft.run from task to result: what it returns, writes, resumes and refuses."""

from __future__ import annotations

import gc
import json
import math
import weakref

import pytest
import torch
from safetensors.torch import load_file

import weft
from tests.engine.random_module import TorchDropout
from tests.graphs_for_tests import small, tiny_graph
from tests.stacks import solo_plan
from weft.core.errors import DivergedError, GraphError, InputError, OutOfMemoryError, SpecError, TrainingError
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.engine.folder import RunFolder
from weft.engine.result import Result
from weft.engine.run import run
from weft.runtime.checkpoint import FILE, read_checkpoint, save_atomically
from weft.runtime.group import GroupRun
from weft.runtime.step.stack import Stack


def make_task(graph=None, **settings):
    graph = tiny_graph() if graph is None else graph
    return Task(**{"graph": graph, "epochs": 20, "name": "t", **small(settings.get("model", "gcn")), **settings})


class TestResult:
    def test_metrics_history_model(self):
        graph = tiny_graph()
        result = run(make_task(graph), progress=False)
        metrics, history = result.metrics, result.history
        assert result.status == "finished"
        assert metrics["epochs_run"] == 20
        assert history["epoch"] == list(range(1, 21))
        best = metrics["best_epoch"] - 1
        assert metrics["val_accuracy"] == max(history["val_accuracy"]) == history["val_accuracy"][best]
        with torch.no_grad():
            logits = result.model(graph.x, graph.adj)
        right = (logits.argmax(1) == graph.y)[graph.test].float().mean().item()
        assert metrics["test_accuracy"] == pytest.approx(right, abs=1e-6)
        assert not result.model.training
        assert metrics["seconds"] > 0
        assert "device" in result.environment

    def test_the_model_can_be_used_and_trained_on(self):
        graph = tiny_graph()
        model = run(make_task(graph, norm="batch", dropout=0.5), progress=False).model
        assert all(isinstance(p, torch.nn.Parameter) for p in model.parameters())
        model.train()
        model(graph.x, graph.adj).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        first, second = model(graph.x, graph.adj), model(graph.x, graph.adj)
        assert not torch.equal(first, second), "dropout is torch's again"

    def test_files(self, tmp_path):
        events = []
        result = run(make_task(norm="batch"), out=tmp_path / "a" / "b", progress=False, on_event=events.append)
        folder = tmp_path / "a" / "b"
        names = {path.name for path in folder.iterdir()}
        assert names == {FILE, "events.jsonl", "result.json", "model.safetensors", "report.html"}
        saved = json.loads((folder / "result.json").read_text())
        assert saved["metrics"]["val_accuracy"] == result.metrics["val_accuracy"]
        assert saved["task"]["hidden"] == 8
        assert saved["environment"]["torch"] == torch.__version__
        assert saved["plan"]["why"]
        weights = load_file(folder / "model.safetensors")
        assert all(torch.equal(weights[k], v) for k, v in result.model.state_dict().items())
        assert len({path.stat().st_mode for path in folder.iterdir()}) == 1, "as readable as any new file"
        journal = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        assert [line["event"] for line in journal] == [event.kind for event in events]
        assert [line["event"] for line in journal[:2]] == ["preparing", "start"]
        assert journal[-1]["event"] == "finish"
        page = (folder / "report.html").read_text()
        assert "<polyline" in page
        assert "http" not in page, "self-contained"

    def test_threads_are_given_back(self):
        before, seen = torch.get_num_threads(), []
        torch.set_num_threads(2)
        try:
            result = run(make_task(), progress=False, on_event=lambda e: seen.append((e.kind, torch.get_num_threads())))
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(before)
        assert {threads for kind, threads in seen if kind == "progress"} == {result.plan.threads} == {1}

    def test_early_stop(self, tmp_path):
        result = run(make_task(epochs=200, lr=0.1, patience=3), out=tmp_path, progress=False)
        assert result.status == "stopped"
        assert result.metrics["epochs_run"] == result.metrics["best_epoch"] + 3 == len(result.history["loss"])

    def test_global_state_is_left_alone(self):
        torch.manual_seed(7)
        expected = torch.rand(3)
        torch.manual_seed(7)
        precision = torch.get_float32_matmul_precision()
        run(make_task(precision="tf32", epochs=2), progress=False)
        assert torch.equal(torch.rand(3), expected)
        assert torch.get_float32_matmul_precision() == precision

    def test_labels_of_many_kinds(self):
        for graph, metric in ((tiny_graph(multilabel=True), "f1_micro"), (tiny_graph(sparse=True), "accuracy")):
            result = run(make_task(graph, epochs=3), progress=False)
            assert result.metrics["metric"] == metric
            assert math.isfinite(result.metrics[f"test_{metric}"])

    def test_one_hot_labels_are_no_guess(self):
        """Rows with a single 1 each may be classes or labels: whoever gives them says which."""
        classes = tiny_graph()
        hot = torch.nn.functional.one_hot(classes.y.clamp(min=0)).float()
        graph = weft.Graph(classes.adj, classes.x, hot, classes.train, classes.val, classes.test)
        with pytest.raises(GraphError, match=r'give y\.argmax\(1\) for classes, or objective="multilabel"'):
            run(make_task(graph, epochs=3), progress=False)
        result = run(make_task(graph, epochs=3, objective="multilabel"), progress=False)
        assert result.metrics["metric"] == "f1_micro"


class StopAfter(BaseException):
    """Raised from a listener to leave a run in the middle."""


def interrupted_after(task, folder, epoch):
    """Train ``task`` and lose the process right after the first checkpoint past ``epoch``."""

    def listen(event):
        if event.kind == "checkpoint" and event.data["epoch"] >= epoch:
            raise StopAfter

    with pytest.raises(StopAfter):
        run(task, out=folder, progress=False, on_event=listen, options=weft.RunOptions(checkpoint_every=0.0))


def same_history(first, second):
    assert first.keys() == second.keys()
    for key in first:
        assert torch.equal(torch.tensor(first[key]).nan_to_num(-9), torch.tensor(second[key]).nan_to_num(-9)), key


class TestResume:
    @pytest.mark.parametrize(
        "settings",
        [
            {"model": "gcn", "norm": "batch", "input_dropout": 0.3},
            {"model": "gat", "schedule": "cosine", "warmup": 3},
            {"model": "sage", "optimizer": "sgd", "momentum": 0.9, "lr": 0.1, "patience": 9},
            {"model": "gin", "optimizer": "adamw", "weight_decay": 0.1, "eval_every": 4},
            {"model": TorchDropout},
        ],
        ids=["gcn", "gat", "sage", "gin", "module"],
    )
    def test_interrupted_and_resumed_is_uninterrupted(self, tmp_path, settings):
        task = make_task(epochs=30, dropout=0.5, **settings)
        whole = run(task, out=tmp_path / "whole", progress=False)
        interrupted_after(task, tmp_path / "parts", 7)
        assert read_checkpoint(tmp_path / "parts").about["epoch"] < 30
        parts = run(task, out=tmp_path / "parts", resume=True, progress=False)
        same_history(parts.history, whole.history)
        ignored = ("seconds", "seconds_per_epoch")
        assert {k: v for k, v in parts.metrics.items() if k not in ignored} == {
            k: v for k, v in whole.metrics.items() if k not in ignored
        }
        for name, tensor in whole.model.state_dict().items():
            assert torch.equal(parts.model.state_dict()[name], tensor), name
        first, second = (read_checkpoint(tmp_path / d).tensors for d in ("whole", "parts"))
        end = whole.metrics["epochs_run"]
        if end == 30:  # past an early stop the weights move on, unread
            assert all(torch.equal(first[n].nan_to_num(), second[n].nan_to_num()) for n in first if n != "x")

    def test_a_finished_run_is_only_reported(self, tmp_path, monkeypatch):
        task = make_task()
        first = run(task, out=tmp_path, progress=False)
        monkeypatch.setattr(GroupRun, "advance", lambda *_: pytest.fail("trained again"))
        second = run(task, out=tmp_path, resume=True, progress=False)
        same_history(first.history, second.history)
        assert second.metrics["test_accuracy"] == first.metrics["test_accuracy"]
        assert second.metrics["seconds"] == first.metrics["seconds"]

    def test_without_a_checkpoint_it_starts_afresh_and_says_so(self, tmp_path):
        events = []
        run(make_task(epochs=2), out=tmp_path, resume=True, progress=False, on_event=events.append)
        assert any("starting afresh" in e.data.get("message", "") for e in events)

    def test_another_task_is_refused(self, tmp_path):
        run(make_task(epochs=2), out=tmp_path, progress=False)
        with pytest.raises(SpecError, match=r"was trained with lr=0\.01, but this task has lr=0\.5"):
            run(make_task(epochs=2, lr=0.5), out=tmp_path, resume=True, progress=False)

    def test_another_graph_is_refused(self, tmp_path):
        run(make_task(epochs=2), out=tmp_path, progress=False)
        wide = tiny_graph()._changed(x=torch.zeros(60, 5))
        with pytest.raises(SpecError, match="was trained on another graph"):
            run(make_task(wide, epochs=2), out=tmp_path, resume=True, progress=False)

    def test_a_damaged_checkpoint_is_named(self, tmp_path):
        run(make_task(epochs=2), out=tmp_path, progress=False)
        path = tmp_path / FILE
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(SpecError, match="not a checkpoint of Weft, or a damaged one"):
            run(make_task(epochs=2), out=tmp_path, resume=True, progress=False)

    def test_starting_afresh_forgets_the_former_run(self, tmp_path):
        run(make_task(epochs=4), out=tmp_path, progress=False)
        run(make_task(epochs=2), out=tmp_path, progress=False, overwrite=True)
        assert read_checkpoint(tmp_path).about["epoch"] == 2
        starts = [line for line in (tmp_path / "events.jsonl").read_text().splitlines() if '"start"' in line]
        assert len(starts) == 1

    def test_without_a_checkpoint_that_is_the_first_thing_said(self, tmp_path):
        events = []
        run(make_task(epochs=2), out=tmp_path, resume=True, progress=False, on_event=events.append)
        assert events[0].data["message"] == "no checkpoint to resume from; starting afresh"
        lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        assert "starting afresh" in lines[0]["message"]
        assert [line["event"] for line in lines[1:3]] == ["preparing", "start"]

    def test_a_run_is_not_deleted_unasked(self, tmp_path):
        interrupted_after(make_task(), tmp_path / "half", 3)
        run(make_task(epochs=2), out=tmp_path / "whole", progress=False)
        run(make_task(epochs=2), progress=False).save(tmp_path / "saved")
        for place in ("half", "whole", "saved"):
            folder = tmp_path / place
            before = {path.name: path.read_bytes() for path in folder.iterdir()}
            with pytest.raises(SpecError, match=r"out='.*': holds a run already; .*resume=True.*overwrite=True"):
                run(make_task(epochs=2), out=folder, progress=False)
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
            run(make_task(epochs=2), out=folder, progress=False, overwrite=True)
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "notes.txt").write_text("not a run")
        run(make_task(epochs=2), out=tmp_path / "mine", progress=False)
        with pytest.raises(SpecError, match=r"resume=True continues .* overwrite=True deletes it; choose one"):
            run(make_task(epochs=2), out=tmp_path / "mine", progress=False, resume=True, overwrite=True)

    def test_resume_needs_a_folder(self):
        with pytest.raises(SpecError, match="resume=True needs out="):
            run(make_task(), resume=True)


class TestStamps:
    def test_events_count_on_after_a_resume(self, tmp_path):
        first, second = [], []
        task = make_task(epochs=40)

        def listen(event):
            first.append(event)
            if event.kind == "checkpoint" and event.data["epoch"] >= 7:
                raise StopAfter

        with pytest.raises(StopAfter):
            run(task, out=tmp_path, progress=False, on_event=listen, options=weft.RunOptions(checkpoint_every=0.0))
        with open(tmp_path / "events.jsonl", "a") as journal:
            journal.write('{"event": "progress", "ta')  # the process was killed while it wrote
        run(task, out=tmp_path, progress=False, on_event=second.append, resume=True)
        assert {event.run for event in first + second} == {first[0].run}
        assert [event.seq for event in first + second] == list(range(1, len(first + second) + 1))
        assert all(event.worker for event in first)
        assert {event.group for event in first + second if event.kind != "preparing"} == {"1"}
        lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        assert [line["seq"] for line in lines] == [event.seq for event in first + second]
        assert {line["run"] for line in lines} == {first[0].run}
        other = []
        run(task, out=tmp_path, progress=False, on_event=other.append, overwrite=True)
        assert other[0].seq == 1
        assert other[0].run != first[0].run

    def test_a_journal_of_a_former_version_is_continued(self, tmp_path):
        run(make_task(epochs=2), out=tmp_path, progress=False)
        path = tmp_path / "events.jsonl"
        stamp = ("run", "seq", "worker", "group_key")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({k: v for k, v in e.items() if k not in stamp}) + "\n" for e in lines))
        events = []
        run(make_task(epochs=2), out=tmp_path, progress=False, resume=True, on_event=events.append)
        assert events[0].seq == 1
        assert len(path.read_text().splitlines()) == len(lines) + len(events)


class TestTrouble:
    def test_an_error_of_on_event_is_reported_once_and_training_goes_on(self, tmp_path):
        called = []

        def listen(event):
            called.append(event)
            raise ValueError("my dashboard is down")

        with pytest.warns(
            RuntimeWarning, match=r"on_event raised ValueError: my dashboard is down \(line \d+ of"
        ) as seen:
            result = run(make_task(), out=tmp_path, progress=False, on_event=listen)
        assert len(seen) == 1
        assert result.status == "finished"
        assert called[-1].kind == "finish"
        notes = [line for line in (tmp_path / "events.jsonl").read_text().splitlines() if "my dashboard" in line]
        assert len(notes) == 1

    def test_a_disk_that_is_full_for_a_while_costs_a_note(self, tmp_path, monkeypatch):
        real, full, events = save_atomically.__globals__["save_file"], [], []

        def scarce(tensors, path, metadata):
            if len(full) < 2:
                full.append(path)
                raise OSError(28, "No space left on device")
            return real(tensors, path, metadata)

        monkeypatch.setitem(save_atomically.__globals__, "save_file", scarce)
        task = make_task()
        result = run(
            task, out=tmp_path, progress=False, options=weft.RunOptions(checkpoint_every=0.0), on_event=events.append
        )
        assert len(full) == 2
        notes = [event.data["message"] for event in events if event.kind == "note"]
        (said,) = [note for note in notes if note.startswith("no checkpoint")]  # once, though it failed twice
        assert "No space left on device" in said
        assert said.endswith("tried again every time")
        assert read_checkpoint(tmp_path).about["finished"]
        same_history(result.history, run(task, progress=False).history)

    def test_a_journal_on_a_full_disk_is_written_later_and_whole(self, tmp_path, monkeypatch):
        events, full = [], []
        real = open

        def scarce(path, *rest, **options):
            if str(path).endswith("events.jsonl") and 2 <= len(events) < 5:
                full.append(path)
                raise OSError(28, "No space left on device")
            return real(path, *rest, **options)

        monkeypatch.setattr("weft.engine.folder.open", scarce, raising=False)
        run(
            make_task(epochs=200),
            out=tmp_path,
            progress=False,
            options=weft.RunOptions(checkpoint_every=0.0),
            on_event=events.append,
        )
        assert full
        lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        assert [line["seq"] for line in lines] == [event.seq for event in events]

    def test_divergence_keeps_the_best_weights(self, tmp_path):
        task = make_task(optimizer="sgd", lr=1e12, epochs=40)
        with pytest.raises(DivergedError, match=r"task 't': .*loss became .* at epoch \d+ of 40; .*lower lr"):
            run(task, out=tmp_path, progress=False)
        saved = json.loads((tmp_path / "result.json").read_text())
        assert saved["status"] == "diverged"
        assert saved["metrics"]["epochs_run"] < 40
        assert all(torch.isfinite(t).all() for t in load_file(tmp_path / "model.safetensors").values())
        assert not (tmp_path / FILE).exists(), "a state that is no longer a number is not worth resuming"

    def test_memory(self, monkeypatch):
        def full(*_):
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(GroupRun, "advance", full)
        events = []
        with pytest.raises(OutOfMemoryError, match="task 't': the device ran out of memory"):
            run(make_task(), progress=False, on_event=events.append)
        assert (events[-1].kind, events[-1].data["status"]) == ("failed", "out of memory")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"x": None}, "graph 'tiny' has no features"),
            ({"y": None}, "graph 'tiny' has no labels"),
            ({"train": torch.empty(0, dtype=torch.int64)}, r"no training nodes; .*random_split"),
        ],
    )
    def test_graphs_that_cannot_be_trained_on(self, change, message):
        with pytest.raises(GraphError, match=message):
            run(make_task(tiny_graph()._changed(**change)), progress=False)

    def test_patience_needs_validation_nodes(self):
        graph = tiny_graph()
        with pytest.raises(SpecError, match="patience=3 needs validation nodes"):
            run(make_task(graph.with_splits(train=graph.train), patience=3), progress=False)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"device": "tpu"}, "device 'tpu'"),
            ({"device": "cuda:77"}, "device 'cuda:77'"),
            ({"progress": "loud"}, "progress='loud' must be True, False, 'auto', 'live' or 'plain'"),
            ({"out": 3}, "out=3 must be a folder"),
            ({"on_event": 3}, "on_event=3 must be a function"),
            ({"control": 3}, r"control=3 must be a weft\.Control"),
            ({"options": {"prune": "median"}}, r"options=\{'prune': 'median'\} must be a weft\.RunOptions"),
            ({"placement": "host"}, r"placement='host' must be a weft\.Placement"),
            ({"options": weft.RunOptions(ranks=2), "ranks": 3}, "options= has ranks=2; give one of the two"),
            ({"weave": "off"}, r"takes no weave='off' by itself; give options=RunOptions\(weave='off'\)"),
            ({"features": "host"}, r"by itself; give placement=Placement\(features='host'\)"),
            ({"wave": True}, r"weft.run takes no wave= \(did you mean 'weave'\?\)"),
        ],
    )
    def test_arguments(self, arguments, message):
        with pytest.raises(SpecError, match=message):
            run(make_task(), **arguments)
        with pytest.raises(SpecError, match=r"takes a weft\.Task, a weft\.Sweep or a list of tasks, not \{'graph'"):
            run({"graph": "cora"})
        with pytest.raises(SpecError, match="not a list whose item 1 is 'cora'"):
            run([make_task(), "cora"])

    def test_a_folder_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(SpecError, match="cannot be made a folder"):
            run(make_task(), out=tmp_path / "file", progress=False)

    def test_a_mistake_leaves_the_former_run_alone(self, tmp_path):
        run(make_task(epochs=2), out=tmp_path, progress=False)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        for mistake in ({"graph": tiny_graph()._changed(y=None)}, {"model": "no.such.package:Net"}):
            with pytest.raises(InputError):
                run(make_task(**{"graph": tiny_graph(), **mistake}), out=tmp_path, progress=False, overwrite=True)
            with pytest.raises(InputError):
                run(make_task(**{"graph": tiny_graph(), **mistake}), out=tmp_path / "new", progress=False)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    def test_a_folder_that_cannot_be_written_to(self, tmp_path, monkeypatch):
        monkeypatch.setattr("os.access", lambda *_: False)
        with pytest.raises(SpecError, match=r"out='.*new': .* cannot be written to"):
            run(make_task(), out=tmp_path / "new", progress=False)
        assert not list(tmp_path.iterdir())

    def test_a_half_written_checkpoint_never_replaces_a_whole_one(self, tmp_path, monkeypatch):
        expected = run(make_task(epochs=2), out=tmp_path, progress=False)
        before = (tmp_path / FILE).read_bytes()

        def torn(tensors, path, metadata):
            path.write_bytes(b"half")
            raise OSError("disk full")

        monkeypatch.setitem(save_atomically.__globals__, "save_file", torn)
        task, graph = make_task(epochs=2), tiny_graph()
        group = GroupRun([task], graph, solo_plan(task, graph.stats(), "cpu"), torch.device("cpu"))
        with pytest.raises(TrainingError, match=r"cannot write to .*: disk full; .* resume=True"):
            RunFolder(tmp_path).save_state("1", group, {})
        assert (tmp_path / FILE).read_bytes() == before
        assert not list(tmp_path.glob("*.partial"))
        events = []
        with pytest.raises(TrainingError, match="disk full") as raised:
            run(make_task(epochs=2), out=tmp_path / "new", progress=False, on_event=events.append)
        assert (events[-1].kind, events[-1].data["status"]) == ("failed", "failed")
        assert raised.value.result.history == expected.history

    def test_what_was_trained_comes_with_the_error_that_it_could_not_be_written(self, tmp_path, monkeypatch):
        """Both groups of a sweep are trained although the results of neither can be written."""

        def full(self, folder):
            raise OSError(28, "No space left on device")

        sweep = Sweep(graph=tiny_graph(), model=["gcn", "gat"], epochs=2)
        expected = run(sweep, progress=False)
        with monkeypatch.context() as patch:
            patch.setattr(Result, "write", full)
            with pytest.raises(TrainingError, match="No space left on device") as raised:
                run(sweep, out=tmp_path / "run", progress=False)
        found = raised.value.result
        assert [member.status for member in found] == ["finished", "finished"]
        assert [member.history for member in found] == [member.history for member in expected]
        again = run(sweep, out=tmp_path / "run", resume=True, progress=False)
        assert [member.history for member in again] == [member.history for member in expected]


def test_models_by_file(tmp_path):
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\ndef make(i, o):\n    return nn.Sequential(nn.Linear(i, o))\n"
    )
    (tmp_path / "torn.py").write_text("def make(:")
    (tmp_path / "raises.py").write_text("def make(i, o):\n    raise ValueError('sizes')\n")
    result = run(make_task(model=f"{tmp_path / 'net.py'}:make", epochs=2), progress=False)
    assert result.metrics["epochs_run"] == 2
    for place, message in (
        (f"{tmp_path / 'net.py'}:other", "has no callable 'other'"),
        (f"{tmp_path / 'none.py'}:make", "no such file"),
        ("no.such.package:make", "No module named 'no'"),
        (":", "with both parts"),
        (f"{tmp_path / 'torn.py'}:make", "SyntaxError"),
        (f"{tmp_path / 'raises.py'}:make", r"ValueError: sizes \(line 2 of .*raises.py\)"),
    ):
        with pytest.raises(SpecError, match=message):
            run(make_task(model=place), progress=False)


@pytest.mark.parametrize("model", ["gcn", "gat", "sage", "gin"])
def test_a_trained_group_does_not_hold_itself(model, monkeypatch):
    """Its memory is free without a garbage collection, which takes a tenth of a second in a large process."""
    found: list[weakref.ref] = []
    made = Stack.__init__

    def noted(self, *args, **named):
        found.append(weakref.ref(self))
        made(self, *args, **named)

    monkeypatch.setattr(Stack, "__init__", noted)
    gc.collect()
    gc.disable()
    try:
        run(make_task(model=model, epochs=2), device="cpu", progress=False)
        assert found
        assert all(stack() is None for stack in found)
    finally:
        gc.enable()
