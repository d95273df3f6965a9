"""Tuned runs: every trial has the numbers that it has alone, in whichever row and after whichever trial it trains."""

from __future__ import annotations

import csv
import math

import pytest
import torch

import weft
from tests.distributions import install
from tests.engine.tuning.tuners import SPACE, Listed, drawn, tuned
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import ModelError, SpecError
from weft.core.plan import Plan
from weft.runtime.group import GroupRun

LOSS = 2e-6  # what the rounding of a stack may change in a loss


def same(first, second):
    """Whether two results are equal bit for bit: histories, and the best weights."""
    weights = zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True)
    return str(first.history) == str(second.history) and all(torch.equal(*pair) for pair in weights)


def check_alone(result):
    """The trial as a task of its own: the same epochs, and losses to rounding."""
    alone = weft.run(result.task, device="cpu", progress=False)
    assert alone.status == result.status
    for column, values in alone.history.items():
        assert len(values) == len(result.history[column])
        for expected, value in zip(values, result.history[column], strict=True):
            assert math.isnan(expected) == math.isnan(value)
            if column.endswith("loss") and not math.isnan(expected):
                assert value == pytest.approx(expected, rel=LOSS, abs=LOSS)


def test_trials_in_used_rows_equal_trials_in_fresh_stacks_bit_for_bit():
    graph, settings = tiny_graph(), drawn(64)
    through = tuned(graph, settings, width=8)
    assert [result.name for result in through][:2] == ["trial-000", "trial-001"]
    for begin in range(0, 64, 8):
        fresh = tuned(graph, settings[begin : begin + 8], width=8)
        for number, result in enumerate(fresh):
            assert result.task.with_values(name="x") == through[begin + number].task.with_values(name="x")
            assert same(result, through[begin + number])


def test_every_trial_has_the_numbers_that_it_has_alone():
    for result in tuned(tiny_graph(), drawn(12), width=3):
        check_alone(result)


@pytest.mark.parametrize(
    "loop",
    [
        {"optimizer": "sgd", "momentum": [0.0, 0.9], "weight_decay": [0.0, 1e-2]},
        {"optimizer": ["adam", "adamw"], "weight_decay": [0.0, 1e-2], "norm": "batch"},
        {"schedule": ["cosine", "linear"], "warmup": [0, 2]},
        {"schedule": "plateau", "plateau": {"patience": 1}},
        {"param_groups": {"*bias": {"lr": 0.001}}},
        {"ema": [0.9, 0.5], "clip_norm": [0.1, 1.0]},
        {"accumulate": [2, 3]},
        {"label_smoothing": [0.0, 0.2], "class_weights": "balanced"},
        {"label_smoothing": [0.0, 0.2]},
        {"eval_every": 3, "patience": [1, 3]},
        {"metric": "f1_macro"},
        {"model": "gat", "heads": 2},
    ],
    ids=lambda loop: "-".join(loop),
)
def test_numbers_of_a_row_are_those_of_its_trial(loop):
    space = {**SPACE, **loop}
    varying = {key: value for key, value in space.items() if isinstance(value, list) or key in ("lr", "seed")}
    for result in tuned(tiny_graph(), drawn(6, space=varying), width=2, space=space):
        check_alone(result)


def test_structures_have_stacks_of_their_own():
    space = {**SPACE, "model": ["gcn", "sage"], "layers": [1, 2]}
    result = tuned(tiny_graph(), drawn(10, space=space), width=6, space=space)
    (plan,) = result.plan
    assert len(plan.stack_members) == 4
    assert {(each.task.model, each.task.layers) for each in result} == {(m, n) for m in ("gcn", "sage") for n in (1, 2)}
    for each in result:
        check_alone(each)


def test_a_row_takes_the_next_trial_whatever_became_of_the_last_one():
    settings = drawn(8, space={**SPACE, "lr": [0.01], "epochs": [6]})
    settings[1]["lr"] = 1e30  # diverges
    settings[2]["patience"] = 1
    space = {**SPACE, "lr": [0.01, 1e30], "optimizer": "sgd", "patience": weft.choice([None, 1])}
    tuner = Listed(settings, stops={"trial-000": 2, "trial-005": 4})
    result = tuned(tiny_graph(), settings, 2, tuner, space)
    assert [each.status for each in result if each.status != "stopped"].count("diverged") == 1
    assert {name: result[name].metrics["epochs_run"] for name in ("trial-000", "trial-005")} == {
        "trial-000": 2,
        "trial-005": 4,
    }
    assert result["trial-000"].status == result["trial-005"].status == "pruned"
    for name in ("trial-003", "trial-004", "trial-006", "trial-007"):
        check_alone(result[name])
    ends = [call[:2] for call in tuner.calls if isinstance(call[1], str)]
    assert sorted(name for name, _ in ends) == [each.name for each in result], "each trial's end is told once"


def test_a_tuner_is_told_every_evaluated_epoch_with_its_score():
    tuner = Listed(drawn(3))
    result = tuned(tiny_graph(), [{}] * 3, 2, tuner)
    for each in result:
        reported = [(epoch, row) for name, epoch, row in tuner.calls if name == each.name and isinstance(epoch, int)]
        assert [epoch for epoch, _ in reported] == list(range(1, each.metrics["epochs_run"] + 1))
        assert [row["score"] for _, row in reported] == each.history["val_accuracy"]
        (told,) = [call[2] for call in tuner.calls if call[0] == each.name and isinstance(call[1], str)]
        assert told["score"] == max(each.history["val_accuracy"])


@pytest.mark.parametrize("name", ["random", "asha", "hyperband", "halving", "pbt"])
def test_built_in_tuners_train_and_repeat_themselves(name):
    sweep = weft.Sweep(tiny_graph(), lr=weft.loguniform(1e-3, 1e-1), hidden=[4, 8], epochs=9)
    options = weft.RunOptions(tuner=weft.Tuner.of(name, seed=1), trials=12, width=4)
    first, second = (weft.run(sweep, options=options, device="cpu", progress=False) for _ in range(2))
    assert all(same(*pair) for pair in zip(first, second, strict=True))
    assert len(first) == 12 if name != "pbt" else len(first) > 12
    assert first.best().metrics["val_accuracy"] == max(each.metrics["val_accuracy"] for each in first)
    assert {"lr", "hidden"} <= set(first.best_settings().settings)


def test_widths_of_a_population_share_a_stack():
    sweep = weft.Sweep(tiny_graph(), lr=weft.loguniform(1e-3, 1e-1), hidden=[4, 8, 256], epochs=10)
    options = weft.RunOptions(tuner="pbt", trials=8, width=8)
    result = weft.run(sweep, options=options, device="cpu", progress=False)
    assert len(result.plan[0].stack_members) == 1
    children = [one for one in result if "parent" in one.metrics]
    assert children
    assert all(one.task.hidden == result[one.metrics["parent"]].task.hidden for one in children)


def test_a_copy_continues_where_its_parent_was():
    settings = drawn(2, space={**SPACE, "epochs": [6], "hidden": [8]})
    copied = {**settings[0], "parent": "trial-000"}

    class Copies(Listed):
        copies = True

        def ask(self, n):
            if self.settings:
                return super().ask(n)
            asked = [copied] if any(call[:2] == ("trial-001", "pruned") for call in self.calls) and n else []
            copied_before = any(call[0] == "trial-002" for call in self.calls)
            return [] if copied_before else asked

    result = tuned(tiny_graph(), settings, 2, Copies(settings, stops={"trial-001": 2}))
    child, parent = result["trial-002"], result["trial-000"]
    assert (child.metrics["parent"], child.metrics["copied_at"]) == ("trial-000", 2)
    assert same(child, parent), "with the same numbers it has the same future"


def test_events_name_the_trials_as_they_begin_and_end():
    events = []
    result = tuned(tiny_graph(), drawn(5), 2, run={"on_event": events.append})
    begun = [event.task for event in events if event.kind == "trial"]
    ended = [event.task for event in events if event.kind == "end"]
    assert begun == [each.name for each in result]
    assert sorted(ended) == begun
    (start,) = [event for event in events if event.kind == "start"]
    assert start.data["tasks"] == 5
    done = [event.data["done"] for event in events if event.kind == "progress"][-1]
    assert done == sum(each.metrics["epochs_run"] for each in result)


def test_trials_that_are_impossible_fail_and_others_take_their_place():
    settings = drawn(4, space={**SPACE, "hidden": [8]})
    settings[1]["warmup"] = 99
    result = tuned(tiny_graph(), settings, 2, space={**SPACE, "warmup": weft.uniform(0, 99)})
    assert result["trial-001"].status == "failed"
    assert "warmup=99 must be below epochs" in result["trial-001"].message
    assert [each.status for each in result].count("finished") == 3


def test_a_plan_says_what_the_search_takes_at_most():
    options = weft.RunOptions(tuner="asha", trials=20, width=5)
    report = weft.plan(weft.Sweep("shape:cora", lr=weft.loguniform(1e-3, 1e-1), epochs=10), "h200", options=options)
    assert "20 trials by ASHA in 5 rows" in str(report)
    assert "at most 200 epochs of trials" in str(report)
    assert report.run_seconds == pytest.approx(40 * report.groups[0].cost.epoch_seconds)


def test_the_budget_bounds_the_width():
    sweep = weft.Sweep("shape:cora", lr=weft.loguniform(1e-3, 1e-1), epochs=10)
    wide = weft.plan(sweep, "h200", options=weft.RunOptions(tuner="random", trials=32))
    budget = int(0.7 * wide.peak_bytes + 0.3 * 800 * 2**20)
    narrow = weft.plan(sweep, "h200", budget=budget, options=weft.RunOptions(tuner="random", trials=32))
    assert len(narrow.plans[0].members) < len(wide.plans[0].members)
    assert narrow.peak_bytes <= budget
    with pytest.raises(weft.OutOfMemoryError, match=r"width=32 needs .* give a lower width"):
        weft.plan(sweep, "h200", budget=budget, options=weft.RunOptions(tuner="random", trials=32, width=32))


LR = weft.loguniform(1e-3, 1e-1)


class Often(weft.Tuner):
    every = "often"


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({}, {"tuner": "asha"}, "needs trials="),
        ({}, {"tuner": "asha", "trials": 3, "prune": "median"}, "does not go with prune=: the tuner ends trials"),
        ({}, {"tuner": "asha", "trials": 3, "ranks": 2}, "does not go with ranks=2"),
        ({}, {"tuner": "asha", "trials": 3, "compile": True}, "does not go with compile="),
        ({}, {"tuner": "asha", "trials": 3, "weave": "merged"}, "does not go with weave="),
        ({"mode": "sampled"}, {"tuner": "asha", "trials": 3}, "sampled batches do not go with a tuner"),
        ({"heads": 4}, {"tuner": "asha", "trials": 3}, "heads has no effect: gcn has no heads"),
        (
            {"split": [0, 1]},
            {"tuner": "asha", "trials": 3},
            "split varies, and the trials of a tuner have it in common",
        ),
        ({"samples": 3}, {"tuner": "asha", "trials": 3}, "a tuner takes trials= instead"),
        ({"layers": [1, 2, 3]}, {"tuner": "asha", "trials": 9, "width": 2}, "the space has 3 structures"),
        ({"layers": [1, 2]}, {"tuner": "pbt", "trials": 9}, "the tuner copies weights from one trial to another"),
        ({"seed": [0, 1]}, {"tuner": Listed([{"hidden": 99}]), "trials": 3}, "not in the space of the sweep"),
        ({}, {"tuner": "asha", "trials": 300, "width": 300}, "width=300 must be at most 256"),
        ({}, {"tuner": "asha", "trials": 10**9}, "trials=1000000000 must be at most 10,000"),
        ({}, {"tuner": Often(), "trials": 3}, "tuner: every='often' must be a whole number"),
        ({}, {"tuner": Listed([{"lr": 0.1}] * 9), "trials": 3, "width": 3}, None),
    ],
)
def test_mistakes(settings, options, message):
    sweep = weft.Sweep(tiny_graph(), lr=LR, epochs=2, **settings)
    if message is None:
        assert len(weft.run(sweep, options=weft.RunOptions(**options), device="cpu", progress=False)) == 3
        return
    with pytest.raises(weft.SpecError) as error:
        weft.run(sweep, options=weft.RunOptions(**options), device="cpu", progress=False)
    assert message in str(error.value)


class Wrong(Listed):
    """Answers what a tuner must not."""

    def __init__(self, answers):
        super().__init__([{"lr": 0.01}, {"lr": 0.02}])
        self.answers = answers

    def ask(self, n):
        return self.answers["ask"](n) if "ask" in self.answers else super().ask(n)

    def stop(self):
        return self.answers.get("stop", [])


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"ask": lambda n: {"lr": 0.1}}, "expected a list of up to 2 dicts of settings"),
        ({"ask": lambda n: [{"lr": 0.1}] * (n + 1)}, "expected a list of up to 2 dicts of settings"),
        ({"ask": lambda n: [{"lr": 0.1, "parent": "trial-009"}]}, "'trial-009', which is not running"),
        ({"ask": lambda n: []}, "the tuner asked for no trial"),
        ({"stop": "trial-000"}, "expected a list of names"),
        ({"stop": ["trial-9"]}, "expected names of running trials"),
    ],
)
def test_wrong_answers_of_a_tuner(answers, message):
    sweep = weft.Sweep(tiny_graph(), lr=LR, epochs=2)
    options = weft.RunOptions(tuner=Wrong(answers), trials=2, width=2)
    with pytest.raises(weft.SpecError, match=message):
        weft.run(sweep, options=options, device="cpu", progress=False)


class Failing(weft.Tuner):
    """Raises in one of its methods."""

    def __init__(self, method):
        super().__init__()
        setattr(self, method, self.fail)

    def fail(self, *arguments):
        raise KeyError("a slip of the user's")


@pytest.mark.parametrize("method", ["begin", "ask", "report", "stop", "tell"])
def test_what_a_tuner_raises_is_one_sentence_with_its_line(method):
    sweep = weft.Sweep(tiny_graph(), lr=LR, epochs=2)
    options = weft.RunOptions(tuner=Failing(method), trials=2, width=2)
    with pytest.raises(ModelError) as error:
        weft.run(sweep, options=options, device="cpu", progress=False)
    assert f'tuner Failing: {method}() raised KeyError: "a slip of the user\'s" (line ' in str(error.value)
    assert "\n" not in str(error.value)


class Twice(weft.Tuner):
    """Counts how often it is asked which trials to end."""

    every = 2
    asked = 0

    def stop(self):
        self.asked += 1
        return []


def test_a_tuner_is_called_when_there_is_something_to_report():
    tuner = Twice()
    sweep = weft.Sweep(tiny_graph(), lr=LR, epochs=6, eval_every=3)
    options = weft.RunOptions(tuner=tuner, trials=1)
    weft.run(sweep, options=options, device="cpu", progress=False)
    assert tuner.asked == 3, "before the first epoch, after three and after six"


def test_stacks_without_a_trial_do_not_train():
    graph, plan = tiny_graph(), Plan(("a", "b"), join="in turn", stacks=((0,), (1,)), device="cpu")
    tasks = [weft.Task(graph=graph, model=model, hidden=4, epochs=3) for model in ("gcn", "sage")]
    group = GroupRun(tasks, graph, plan, torch.device("cpu"))
    group.open_rows()
    group.fill(1, tasks[1])
    idle, filled = group.stacks
    before = idle.state.flat.clone(), filled.state.flat.clone()
    group.advance(3)
    assert torch.equal(idle.state.flat, before[0])
    assert not torch.equal(filled.state.flat, before[1])


def test_members_can_be_cancelled_by_name_and_leave_their_rows():
    control = weft.Control()
    listen = lambda event: event.kind == "trial" and event.task == "trial-001" and control.cancel("trial-001")  # noqa: E731
    settings = drawn(4, space={**SPACE, "epochs": [7], "hidden": [8]})
    result = tuned(tiny_graph(), settings, 2, run={"control": control, "on_event": listen})
    assert {one.name: one.status for one in result if one.status != "finished"} == {"trial-001": "cancelled"}
    check_alone(result["trial-002"])


def test_trials_without_a_row_are_cancelled_with_the_others():
    control = weft.Control()
    listen = lambda event: event.kind == "rows" and control.cancel()  # noqa: E731
    settings = drawn(4, space={**SPACE, "model": ["gcn"], "epochs": [7], "hidden": [8]})
    space = {**SPACE, "model": ["gcn", "sage"]}
    result = tuned(tiny_graph(), settings, 4, space=space, run={"control": control, "on_event": listen})
    assert result.statuses == {"cancelled": 4}


def test_no_tuner_no_trials():
    with pytest.raises(weft.SpecError, match="trials=3 would have no effect without tuner="):
        weft.run(weft.Task("demo"), options=weft.RunOptions(trials=3), progress=False)
    with pytest.raises(weft.SpecError, match="chooses trials out of a"):
        weft.run(weft.Task("demo"), options=weft.RunOptions(tuner="asha", trials=3), progress=False)


def test_the_tuner_of_another_distribution_is_chosen_by_name(tmp_path, monkeypatch):
    code = "import weft\nclass Halves(weft.Tuner):\n    def __init__(self, least=2):\n        super().__init__()\n"
    install(tmp_path, monkeypatch, "plugged_tuners", code, tuners={"halves": "Halves"})
    space = weft.Sweep(tiny_graph(), model="gcn", hidden=4, lr=weft.loguniform(1e-3, 1e-1), epochs=3)
    result = weft.run(space, options=weft.RunOptions(tuner="halves", trials=3, width=2), progress=False)
    assert [member.status for member in result] == ["finished"] * 3
    with pytest.raises(SpecError, match="must be one of random, asha"):
        weft.RunOptions(tuner="halve", trials=3)


def test_trials_are_logged_with_their_settings_and_every_epoch(tmp_path):
    file = tmp_path / "trials.csv"
    space = weft.Sweep(tiny_graph(), model="gcn", hidden=4, lr=weft.loguniform(1e-3, 1e-1), epochs=3)
    options = weft.RunOptions(tuner="random", trials=5, width=2, log=f"csv:{file}")
    result = weft.run(space, options=options, progress=False)
    with open(file, newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == 15
    for member in result:
        mine = [row for row in rows if row["task"] == member.name]
        assert [int(row["epoch"]) for row in mine] == [1, 2, 3]
        assert {float(row["lr"]) for row in mine} == {member.task.lr}
