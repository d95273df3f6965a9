"""weft.run of sweeps: members as they would be alone, ends of all kinds, groups that fail."""

from __future__ import annotations

import json
import threading

import pytest
import torch

import weft
from tests.engine.random_module import TorchDropout
from tests.engine.small_sweeps import make_sweep, of_kind
from tests.graphs_for_tests import tiny_graph
from weft.batches import FeatureStore
from weft.core.errors import InputError, OutOfMemoryError, SpecError
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.engine.control import Control
from weft.engine.driver import Driver
from weft.engine.run import run
from weft.engine.sweep_result import SweepResult
from weft.planner.pruning import MedianPruner
from weft.runtime.group import GroupRun


class TestMembers:
    def test_every_member_is_as_it_would_be_alone(self):
        sweep = make_sweep(
            model=["gcn", "gat"], hidden=[4, 8], lr=[0.01, 0.1], epochs=[7, 12], dropout=0.3, patience=10
        )
        result = run(sweep, progress=False)
        assert isinstance(result, SweepResult)
        assert [member.task for member in result] == sweep.tasks()
        for index in (0, 3, 9, 15):
            member, alone = result[index], run(sweep.tasks()[index], progress=False)
            assert member.status == alone.status
            assert member.metrics["epochs_run"] == alone.metrics["epochs_run"]
            assert member.metrics["best_epoch"] == alone.metrics["best_epoch"]
            torch.testing.assert_close(
                torch.tensor(member.history["loss"]), torch.tensor(alone.history["loss"]), rtol=1e-4, atol=1e-5
            )
            for name, weight in alone.model.state_dict().items():
                torch.testing.assert_close(member.model.state_dict()[name], weight, rtol=1e-3, atol=1e-4)

    def test_models_give_what_the_metrics_say(self):
        graph = tiny_graph()
        result = run(make_sweep(graph, hidden=[4, 8], seed=[0, 1]), progress=False)
        for member in result:
            with torch.no_grad():
                right = (member.model(graph.x, graph.adj).argmax(1) == graph.y)[graph.test].float().mean().item()
            assert member.metrics["test_accuracy"] == pytest.approx(right, abs=1e-6)

    def test_running_statistics_are_those_of_the_best_epoch(self, monkeypatch):
        monkeypatch.setattr(Driver, "_leaving", lambda _: ())  # ended members stay in the step to the end
        sweep = make_sweep(norm="batch", epochs=[3, 40], seed=[0, 1], lr=0.05)
        result = run(sweep, progress=False)
        assert len(result.plan) == 1
        for member in result:
            alone = run(member.task, progress=False)
            assert member.metrics["best_epoch"] == alone.metrics["best_epoch"]
            theirs, mine = alone.model.state_dict(), member.model.state_dict()
            assert any("running_mean" in name for name in theirs)
            for name, value in theirs.items():
                torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-5, msg=name)

    def test_seconds_of_members_add_up(self):
        result = run(make_sweep(seed=range(4)), progress=False)
        total = sum(member.metrics["seconds"] for member in result)
        assert 0 < total <= result.seconds

    def test_a_list_of_tasks(self):
        graph = tiny_graph()
        result = run(
            [Task(graph, hidden=8, epochs=3), Task(graph, hidden=8, epochs=3, seed=1, name="b")], progress=False
        )
        assert [member.name for member in result] == ["seed=0", "b"]
        with pytest.raises(SpecError, match="not an empty list"):
            run([])
        with pytest.raises(SpecError, match="not a list whose item 0 is 1"):
            run([1, 2])

    def test_tasks_on_several_graphs_are_ranked_apart(self, tmp_path):
        first, second = tiny_graph(), tiny_graph(seed=1)._changed(name="other")
        events = []
        sweep = Sweep([first, second], hidden=8, epochs=3, seed=[0, 1])
        result = run(sweep, out=tmp_path, on_event=events.append, progress=False)
        assert [member.name for member in result] == ["tiny seed=0", "tiny seed=1", "other seed=0", "other seed=1"]
        assert [set(plan.members) for plan in result.plan] == [
            {"tiny seed=0", "tiny seed=1"},
            {"other seed=0", "other seed=1"},
        ]
        assert [event.data["graph"] for event in of_kind(events, "group")] == ["tiny", "other"]
        with pytest.raises(SpecError, match="has 2 graphs, whose scores do not compare; say which with graph="):
            result.best()
        for graph, object_ in (("tiny", first), ("other", second)):
            assert result.best(graph=graph).task.graph is object_
            assert result.best(graph=object_) is result.best(graph=graph) is result.on(graph).best()
            assert [result[i].task.graph for i in result.ranking("test_accuracy", graph)] == [object_] * 2
        saved = json.loads((tmp_path / "result.json").read_text())
        assert {name: one["best"] for name, one in saved["graphs"].items()} == {
            graph: result.best(graph=graph).name for graph in ("tiny", "other")
        }
        assert saved["best"] is None
        assert [row["graph"] for row in saved["tasks"]] == ["tiny", "tiny", "other", "other"]
        assert of_kind(events, "finish")[0].data["graphs"] == saved["graphs"]
        assert "4 trainings on tiny, other" in (tmp_path / "report.html").read_text()

    def test_members_are_pruned_among_those_on_their_graph(self):
        graphs = [tiny_graph(), tiny_graph(seed=1)._changed(name="other")]
        asked = []

        def policy(epoch, scores, running):
            asked.append((sorted(scores), sorted(running)))

        run(Sweep(graphs, hidden=8, epochs=11, seed=[0, 1]), options=weft.RunOptions(prune=policy), progress=False)
        both = [[f"{graph.name} seed={seed}" for seed in (0, 1)] for graph in graphs]
        assert asked == [(names, names) for names in both]

    def test_a_sweep_of_one_is_a_sweep(self, tmp_path):
        result = run(make_sweep(), progress=False, out=tmp_path)
        assert len(result) == 1
        assert (tmp_path / "tasks" / "gcn" / "model.safetensors").exists()
        assert "1 training on tiny" in (tmp_path / "report.html").read_text()

    def test_modules_of_ones_own(self):
        sweep = make_sweep(model=[TorchDropout, Plain], lr=[0.01, 0.1], seed=[0, 1])
        assert sweep.tasks()[0].name == "TorchDropout lr=0.01 seed=0"
        result = run(sweep, progress=False)
        for member in result:
            alone = run(member.task, progress=False)
            assert member.history["loss"] == pytest.approx(alone.history["loss"], rel=1e-4), member.name
            assert type(member.model) is type(alone.model)

    def test_without_validation_nodes_training_counts(self, tmp_path):
        graph = tiny_graph()
        sweep = make_sweep(graph.with_splits(train=graph.train), lr=[1e-4, 0.1])
        result = run(sweep, progress=False, out=tmp_path)
        assert result.metric == "train_accuracy"
        assert result.best().name == "lr=0.1"
        assert "by training accuracy" in (tmp_path / "report.html").read_text()

    def test_many_labels(self):
        result = run(make_sweep(tiny_graph(multilabel=True), seed=[0, 1]), progress=False)
        assert result.metric == "val_f1_micro"
        assert result.best().metrics["val_f1_micro"] == max(member.metrics["val_f1_micro"] for member in result)


class Plain(torch.nn.Sequential):
    """Layers of torch alone."""

    def __init__(self, in_features, out_features):
        super().__init__(torch.nn.Linear(in_features, 5), torch.nn.ReLU(), torch.nn.Linear(5, out_features))


class TestEvents:
    def test_events_tell_the_whole_and_every_member(self, tmp_path):
        events = []
        result = run(
            make_sweep(model=["gcn", "sage"], seed=[0, 1]), progress=False, on_event=events.append, out=tmp_path
        )
        planned, start = events[:2]
        assert (planned.kind, planned.data["tasks"], planned.data["groups"]) == ("preparing", 4, len(result.plan))
        assert (start.kind, start.task, start.data["tasks"], start.data["epochs"]) == ("start", "s", 4, 48)
        assert [event.data["group"] for event in of_kind(events, "group")] == list(range(1, len(result.plan) + 1))
        assert sorted(event.task for event in of_kind(events, "end")) == sorted(member.name for member in result)
        last = of_kind(events, "progress")[-1].data
        assert (last["done"], last["total"]) == (48, 48)
        assert events[-1].kind == "finish"
        assert events[-1].data["best"] == result.best().name
        journal = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        assert [line["event"] for line in journal] == [event.kind for event in events]


class TestEnds:
    def test_members_end_at_their_own_time(self):
        result = run(make_sweep(epochs=[5, 9, 60], patience=8, lr=0.1, seed=[0, 1]), progress=False)
        assert [member.metrics["epochs_run"] for member in result][:4] == [5, 5, 9, 9]
        for member in result.tasks[4:]:
            assert member.status == "stopped"
            assert member.metrics["epochs_run"] == member.metrics["best_epoch"] + 8 == len(member.history["loss"])

    def test_a_diverged_member_costs_nobody_else_anything(self, tmp_path):
        settings = {"optimizer": "sgd", "seed": [0, 1]}
        result = run(make_sweep(lr=[0.1, 1e30], **settings), progress=False, out=tmp_path)
        assert [member.status for member in result] == ["finished", "finished", "diverged", "diverged"]
        assert "task 'lr=1e+30 seed=0'" in result[2].message
        assert "lower lr" in result[2].message
        calm = run(make_sweep(lr=[0.1, 0.2], **settings), progress=False)
        assert result[0].history["loss"] == calm[0].history["loss"], "bit for bit"
        for name, weight in calm[1].model.state_dict().items():
            assert torch.equal(result[1].model.state_dict()[name], weight)
        saved = json.loads((tmp_path / "tasks" / "lr=1e+30_seed=0" / "result.json").read_text())
        assert saved["status"] == "diverged"

    def test_pruning_is_the_same_whenever_the_host_looks(self, monkeypatch):
        sweep = make_sweep(lr=[1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.3], epochs=30)
        pruner = MedianPruner(warmup=10, every=5)
        result = run(sweep, progress=False, options=weft.RunOptions(prune=pruner))
        ended = {member.name: member.metrics["epochs_run"] for member in result}
        assert any(member.status == "pruned" for member in result)
        assert set(ended.values()) <= {10, 15, 20, 25, 30}
        assert result.best().status == "finished"
        pruned = next(member for member in result if member.status == "pruned")
        assert f"pruned after epoch {ended[pruned.name]}" in pruned.message
        assert pruned.metrics["best_epoch"] <= ended[pruned.name]
        monkeypatch.setattr("weft.engine.driver.POLL_SECONDS", 0.0)
        again = run(sweep, progress=False, options=weft.RunOptions(prune=pruner))
        assert {member.name: member.metrics["epochs_run"] for member in again} == ended

    def test_a_policy_of_ones_own(self):
        asked = []

        def policy(epoch, scores, running):
            asked.append((epoch, {name: len(values) for name, values in scores.items()}, list(running)))
            return ["seed=1"] if "seed=1" in running else []

        result = run(make_sweep(seed=[0, 1], epochs=25), progress=False, options=weft.RunOptions(prune=policy))
        assert result["seed=1"].metrics["epochs_run"] == 10
        assert result["seed=0"].metrics["epochs_run"] == 25
        assert asked == [
            (10, {"seed=0": 10, "seed=1": 10}, ["seed=0", "seed=1"]),
            (20, {"seed=0": 20, "seed=1": 10}, ["seed=0"]),
        ]
        with pytest.raises(SpecError, match="prune returned 'nobody'; expected names of running members: seed=0"):
            run(make_sweep(seed=[0, 1]), progress=False, options=weft.RunOptions(prune=lambda *_: ["nobody"]))
        with pytest.raises(SpecError, match="prune returned 'seed=0'; expected a list of names"):
            run(make_sweep(seed=[0, 1], epochs=11), progress=False, options=weft.RunOptions(prune=lambda *_: "seed=0"))
        nobody = run(make_sweep(seed=[0, 1], epochs=11), progress=False, options=weft.RunOptions(prune=lambda *_: None))
        assert nobody.statuses == {"finished": 2}

    def test_cancelling_members_and_all(self, tmp_path):
        cancel, events = Control(), []

        def listen(event):
            events.append(event)
            if event.kind == "progress":
                cancel.cancel("seed=1")

        result = run(make_sweep(seed=[0, 1, 2], epochs=40), progress=False, control=cancel, on_event=listen)
        assert [member.status for member in result] == ["finished", "cancelled", "finished"]
        assert 0 < result["seed=1"].metrics["epochs_run"] < 40
        assert result["seed=1"].model is not None
        everything = Control()
        thread = threading.Thread(target=everything.cancel)
        thread.start()
        thread.join()
        events.clear()
        result = run(
            make_sweep(seed=[0, 1]), progress=False, control=everything, out=tmp_path / "never", on_event=events.append
        )
        assert result.statuses == {"cancelled": 2}
        assert [event.kind for event in events] == ["preparing", "end", "end", "finish"]
        assert "report" not in events[-1].data
        assert not (tmp_path / "never").exists(), "nothing has begun"
        one = Control()
        task = make_sweep(epochs=5000).tasks()[0]
        alone = run(task, progress=False, control=one, on_event=lambda event: event.kind == "progress" and one.cancel())
        assert alone.status == "cancelled"

    def test_a_name_that_nobody_has_is_told(self):
        early = Control()
        early.cancel("seed=7")
        with pytest.raises(SpecError, match=r"cancel\('seed=7'\): no member has that name; did you mean 'seed=.'"):
            run(make_sweep(seed=range(2)), progress=False, control=early)
        late, told = Control(), []

        def listen(event):
            if event.kind == "group":
                with pytest.raises(SpecError, match="no member has that name; they are: seed=0, seed=1") as error:
                    late.cancel("gcn", "seed=1")
                told.append(str(error.value))

        assert run(make_sweep(seed=range(2)), progress=False, control=late, on_event=listen).statuses == {"finished": 2}
        assert len(told) == 1

    def test_ended_members_leave(self, monkeypatch):
        left = []
        real = GroupRun.drop
        monkeypatch.setattr(GroupRun, "drop", lambda group, who: (left.append(list(who)), real(group, left[-1]))[1])
        sweep = make_sweep(epochs=[3, 40], seed=[0, 1])
        again = run(sweep, progress=False)
        assert left == [[0, 1]]
        monkeypatch.setattr("weft.engine.driver.LEAVE_EVERY", 1000)
        whole = run(sweep, progress=False)
        assert left == [[0, 1]]
        for one, other in zip(whole, again, strict=True):
            assert one.metrics["epochs_run"] == other.metrics["epochs_run"]
            assert one.history["loss"] == pytest.approx(other.history["loss"], rel=1e-4)
        assert again[0].model.state_dict().keys() == again[2].model.state_dict().keys()

    def test_numbers_do_not_depend_on_how_often_one_looks(self, monkeypatch):
        sweep = make_sweep(model="gin", hidden=[4, 8], epochs=[5, 60], lr=[0.01, 0.1])
        often, seldom = [], []
        for seconds, histories in ((0.0, often), (100.0, seldom)):
            monkeypatch.setattr("weft.engine.driver.POLL_SECONDS", seconds)
            histories += [member.history for member in run(sweep, progress=False)]
        assert often == seldom

    def test_members_on_a_gpu_leave_when_that_pays(self, monkeypatch):
        asked = []
        as_on_a_gpu = lambda members, options, device, *rest: Driver(members, options, "cuda", *rest)  # noqa: E731
        monkeypatch.setattr("weft.engine.job.Driver", as_on_a_gpu)
        monkeypatch.setattr("weft.engine.driver.pays_to_leave", lambda *pay: asked.append(pay[:3]) or pay[0] == 2)
        result = run(make_sweep(epochs=[3, 40], seed=[0, 1]), progress=False)
        assert result.statuses == {"finished": 4}
        assert (2, 4) in {pay[:2] for pay in asked}, "two of four have ended"
        assert asked[-1][1] == 2, "and are out of the step"


class TestTrouble:
    def test_a_member_that_fails_first_is_in_the_journal(self, tmp_path):
        run(make_sweep(model=["nowhere.py:Net", "gcn"], epochs=2), progress=False, out=tmp_path)
        journal = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
        assert [event["event"] for event in journal[:4]] == ["preparing", "start", "end", "group"]
        assert (journal[2]["task"], journal[2]["status"]) == ("nowhere.py:Net", "failed")

    def test_memory_that_is_not_enough_for_all_is_enough_for_some(self, monkeypatch, tmp_path):
        real = GroupRun.advance

        def scarce(group, *rest):
            if len(group.tasks) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return real(group, *rest)

        monkeypatch.setattr(GroupRun, "advance", scarce)
        events = []
        result = run(make_sweep(seed=range(5)), progress=False, on_event=events.append, out=tmp_path)
        assert result.statuses == {"finished": 5}
        assert sorted(len(plan.members) for plan in result.plan) == [1, 2, 2]
        assert all("one of two halves of a group of" in plan.why[0] for plan in result.plan)
        assert not any(
            "tasks stacked" in reason for plan in result.plan if len(plan.members) == 1 for reason in plan.why
        )
        assert any(
            "5 tasks ('seed=0', ...): the device ran out of memory" in event.data.get("message", "") for event in events
        )
        assert {path.name for path in (tmp_path / "groups").iterdir()} == {"1a", "1ba", "1bb"}
        assert len(run(make_sweep(seed=range(5)), progress=False, out=tmp_path, resume=True)) == 5

    @pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
    def test_memory_that_runs_out_in_a_stage_of_sampled_batches(self, monkeypatch, error):
        real, reads = FeatureStore.read, []

        def scarce(store, *rest):
            reads.append(store)
            if len(reads) == 3:
                raise error
            return real(store, *rest)

        monkeypatch.setattr(FeatureStore, "read", scarce)
        sampled = {"mode": "sampled", "batch": 8, "fanout": [3, 2], "model": "sage", "layers": 2}
        result = run(make_sweep(seed=range(4), epochs=2, **sampled), progress=False)
        assert result.statuses == {"finished": 4}
        assert any("one of two halves of a group of" in plan.why[0] for plan in result.plan)

    def test_a_member_that_fails_on_the_way_keeps_its_history(self, monkeypatch, tmp_path):
        real = GroupRun.advance

        def scarce(group, *rest):
            if group.epoch > 2 and any(task.seed for task in group.tasks):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return real(group, *rest)

        monkeypatch.setattr(GroupRun, "advance", scarce)
        result = run(make_sweep(seed=range(2)), progress=False, out=tmp_path)
        assert result.statuses == {"finished": 1, "failed": 1}
        saved = json.loads((tmp_path / "tasks" / "seed=1" / "result.json").read_text())
        assert saved["status"] == "failed"
        assert "memory" in saved["message"]
        assert 2 < saved["metrics"]["epochs_run"] == len(saved["history"]["loss"]) < 12

    def test_a_member_that_does_not_fit_at_all(self, monkeypatch):
        real = GroupRun.__init__

        def picky(group, tasks, *rest, **options):
            if any(task.seed == 3 for task in tasks):
                raise torch.OutOfMemoryError("CUDA out of memory")
            real(group, tasks, *rest, **options)

        monkeypatch.setattr(GroupRun, "__init__", picky)
        result = run(make_sweep(seed=range(4)), progress=False)
        assert result.statuses == {"finished": 3, "failed": 1}
        assert result["seed=3"].model is None
        assert "the device ran out of memory" in result["seed=3"].message
        assert result.best().name != "seed=3"
        with pytest.raises(OutOfMemoryError, match=r"task 'lr=0.1': the device ran out of memory"):
            run(make_sweep(tasks=[{"seed": 3, "lr": 0.1}, {"seed": 3, "lr": 0.2}]), progress=False)

    def test_a_model_that_cannot_be_built_costs_nobody_else(self, tmp_path):
        result = run(make_sweep(model=["no.such.package:Net", "gcn"]), progress=False, out=tmp_path / "some")
        assert result.statuses == {"failed": 1, "finished": 1}
        assert "No module named" in (tmp_path / "some" / "report.html").read_text()
        assert "No module named" in result[0].message
        saved = json.loads((tmp_path / "some" / "tasks" / "no.such.package_Net" / "result.json").read_text())
        assert (saved["status"], saved["message"], saved["history"]) == ("failed", result[0].message, {})
        with pytest.raises(InputError, match="No module named"):
            run(make_sweep(model="no.such.package:Net", seed=[0, 1]), progress=False, out=tmp_path / "new")
        assert not (tmp_path / "new").exists(), "nothing is written for what cannot begin"

    def test_a_graph_that_cannot_be_trained_on(self):
        with pytest.raises(InputError, match="has no labels"):
            run(make_sweep(tiny_graph()._changed(y=None), seed=[0, 1]), progress=False)
