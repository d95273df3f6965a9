"""Studies of Optuna as tuners: what the study knows is what the run did, also after it was resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

import weft
from tests.graphs_for_tests import tiny_graph

optuna = pytest.importorskip("optuna")
State = optuna.trial.TrialState
optuna.logging.set_verbosity(optuna.logging.WARNING)

SPACE = {
    "model": ["gcn", "sage"],
    "hidden": [8, 16],
    "lr": weft.loguniform(1e-3, 1e-1),
    "dropout": weft.uniform(0, 0.8, step=0.3),
    "weight_decay": weft.choice([0.0, 5e-4]),
    "betas": [(0.9, 0.999), (0.8, 0.99)],
    "warmup": weft.uniform(0, 3),
}


def new_study(direction="maximize", pruner=None, **storage):
    sampler = optuna.samplers.TPESampler(seed=0, n_startup_trials=4, constant_liar=True)
    pruner = pruner or optuna.pruners.NopPruner()
    return optuna.create_study(direction=direction, sampler=sampler, pruner=pruner, **storage)


def search(study, graph="demo", trials=12, width=4, space=SPACE, epochs=9, **run):
    options = weft.RunOptions(tuner=study, trials=trials, width=width, **run.pop("options", {}))
    return weft.run(weft.Sweep(graph, **space, epochs=epochs), options=options, device="cpu", progress=False, **run)


def by_name(study):
    return {trial.user_attrs["weft_trial"]: trial for trial in study.trials}


def test_a_study_knows_the_settings_and_scores_of_all_trials():
    study = new_study()
    result = search(study)
    trials = by_name(study)
    assert list(trials) == [each.name for each in result] == [f"trial-{number:03d}" for number in range(12)]
    for each in result:
        trial = trials[each.name]
        assert trial.state == State.COMPLETE
        assert trial.value == each.metrics["val_accuracy"]
        assert list(trial.intermediate_values) == each.history["epoch"]
        assert list(trial.intermediate_values.values()) == pytest.approx(each.history["val_accuracy"])
        assert set(trial.params) == set(SPACE)
        same = ("model", "hidden", "lr", "dropout", "weight_decay", "warmup")
        assert {name: getattr(each.task, name) for name in same} == {name: trial.params[name] for name in same}
        assert str(each.task.betas) == trial.params["betas"]
    assert study.best_value == result.best().metrics["val_accuracy"]
    kinds = {name: type(distribution).__name__ for name, distribution in study.trials[0].distributions.items()}
    assert kinds["model"] == kinds["hidden"] == kinds["betas"] == "CategoricalDistribution"
    assert kinds["warmup"] == "IntDistribution"
    assert study.trials[0].distributions["lr"].log
    assert study.trials[0].distributions["dropout"] == optuna.distributions.FloatDistribution(0, 0.6, step=0.3)


def test_losses_are_minimised():
    study, graph = new_study("minimize"), numbers_to_predict()
    space = {"lr": weft.loguniform(1e-3, 1e-1), "metric": "mse"}
    with pytest.raises(weft.SpecError, match="create it with direction='minimize'"):
        search(new_study("maximize"), graph, space=space)
    result = search(study, graph, space=space, trials=4)
    values = {each.name: each.metrics["val_mse"] for each in result}
    assert {name: trial.value for name, trial in by_name(study).items()} == values
    assert study.best_value == result.best().metrics["val_mse"] == min(values.values())


def numbers_to_predict():
    graph = tiny_graph()
    y = graph.x[:, 0] * 2 + 0.5
    parts = {name: getattr(graph, name) for name in ("train", "val", "test")}
    return weft.Graph.from_edges(*graph.edge_index(), x=graph.x, y=y, **parts, name="numbers")


def test_the_pruner_ends_trials():
    study = new_study(pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=2))
    result = search(study, trials=20)
    statuses = {each.name: each.status for each in result}
    assert set(statuses.values()) == {"finished", "pruned"}
    for name, trial in by_name(study).items():
        assert trial.state == (State.PRUNED if statuses[name] == "pruned" else State.COMPLETE)
        assert trial.last_step == result[name].metrics["epochs_run"]


class Watching(optuna.pruners.BasePruner):
    """Notes the steps of trials at which it is asked."""

    def __init__(self):
        self.steps = {}

    def prune(self, study, trial):
        self.steps.setdefault(trial.number, []).append(trial.last_step)
        return False


def test_the_pruner_sees_every_reported_epoch_as_in_a_loop():
    pruner = Watching()
    result = search(new_study(pruner=pruner), tiny_graph(), trials=3, width=2, epochs=60)
    assert pruner.steps == {number: list(range(1, 61)) for number in range(len(result))}


@pytest.mark.filterwarnings("ignore:.*BruteForceSampler")
@pytest.mark.parametrize("kind", ["grid", "brute force"])
def test_a_search_ends_once_the_sampler_has_tried_everything(kind):
    grid = {"hidden": [4, 8], "lr": [0.01, 0.1]}
    sampler = optuna.samplers.GridSampler(grid) if kind == "grid" else optuna.samplers.BruteForceSampler()
    study = optuna.create_study(direction="maximize", sampler=sampler)
    result = search(study, tiny_graph(), space=grid, trials=20, width=2, epochs=3)
    assert sorted((each.task.hidden, each.task.lr) for each in result) == [(4, 0.01), (4, 0.1), (8, 0.01), (8, 0.1)]
    assert {trial.state for trial in study.trials} == {State.COMPLETE}


def test_a_study_of_another_space_is_refused():
    study = new_study()
    study.optimize(lambda trial: trial.suggest_categorical("hidden", [4, 5]), n_trials=1)
    with pytest.raises(weft.SpecError, match=r"does not take the settings of this sweep: .* dynamic value space"):
        search(study, tiny_graph(), trials=2, width=2)


def test_entries_of_a_sweep_are_branches():
    study = new_study()
    entries = [{"model": "gcn", "hidden": [8, 16]}, {"model": "sage", "hidden": [4, 8], "aggregator": "mean"}]
    sweep = weft.Sweep(tiny_graph(), tasks=entries, lr=weft.loguniform(1e-3, 1e-1), epochs=3)
    result = weft.run(sweep, options=weft.RunOptions(tuner=study, trials=8, width=4), device="cpu", progress=False)
    for name, trial in by_name(study).items():
        number = trial.params["tasks"]
        assert result[name].task.model == entries[number]["model"]
        assert result[name].task.hidden == trial.params[f"hidden of tasks[{number}]"]
        assert result[name].task.lr == trial.params["lr"]


def test_trials_that_went_wrong_have_failed():
    study = new_study()
    study.enqueue_trial({"lr": 1e30})
    study.enqueue_trial({"lr": 0.01, "warmup": 12})
    space = {"lr": [0.01, 1e30], "optimizer": "sgd", "warmup": weft.uniform(0, 12)}
    result = search(study, tiny_graph(), space=space, trials=5, width=2)
    assert (result["trial-000"].status, result["trial-001"].status) == ("diverged", "failed")
    trials = by_name(study)
    assert trials["trial-000"].state == trials["trial-001"].state == State.FAIL
    assert len(study.get_trials(states=(State.RUNNING, State.WAITING))) == 0


def test_what_does_not_fit_is_told_with_its_violation_and_not_trained():
    study = new_study()
    space = {"hidden": [8, 4096], "lr": weft.loguniform(1e-3, 1e-1)}
    small, large = (weft.plan(weft.Task("demo", hidden=width, epochs=3), "cpu").peak_bytes for width in (8, 4096))
    budget = small * 6
    assert budget < large
    result = search(study, space=space, epochs=3, width=2, budget=budget)
    assert len(result) == 12
    for name, trial in by_name(study).items():
        member, fits = result[name], trial.params["hidden"] == 8
        assert trial.constraints["memory"] == pytest.approx(trial.user_attrs["predicted_bytes"] / budget - 1)
        assert (trial.constraints["memory"] <= 0) == fits
        assert (trial.state, member.status) == ((State.COMPLETE, "finished") if fits else (State.PRUNED, "failed"))
        assert member.task.hidden == trial.params["hidden"]
        if not fits:
            assert trial.value is None
            assert not trial.intermediate_values
            assert "not trained: it needs" in member.message
    assert {trial.params["hidden"] for trial in study.trials} == {8, 4096}
    with pytest.raises(weft.OutOfMemoryError, match="no trial of this space fits"):
        search(new_study(), space={**space, "hidden": [2048, 4096]}, budget=budget)


def test_other_tuners_draw_what_fits():
    space = weft.Sweep("demo", hidden=[8, 4096], lr=weft.loguniform(1e-3, 1e-1), epochs=2)
    budget = weft.plan(weft.Task("demo", hidden=8, epochs=2), "cpu").peak_bytes * 6
    options = weft.RunOptions(tuner="random", trials=6, width=2)
    result = weft.run(space, options=options, device="cpu", budget=budget, progress=False)
    assert [each.task.hidden for each in result] == [8] * 6


def stored(path, **storage):
    return new_study(storage=f"sqlite:///{path / 'study.db'}", study_name="search", load_if_exists=True, **storage)


def resumed(path, study, **run):
    options = {"checkpoint_every": 0}
    return search(study, tiny_graph(), 8, 3, epochs=12, out=path / "run", options=options, **run)


def check_whole(study, result):
    trials = by_name(study)
    assert list(trials) == [each.name for each in result]
    assert len(study.trials) == 8
    ends = {"finished": State.COMPLETE, "pruned": State.PRUNED}
    for each in result:
        assert trials[each.name].state == ends[each.status]
        assert each.task.lr == trials[each.name].params["lr"]
        assert list(trials[each.name].intermediate_values) == each.history["epoch"]


@pytest.mark.parametrize("end", ["preempt", pytest.param("kill", marks=pytest.mark.rest)])
def test_a_study_in_a_storage_is_resumed(end, tmp_path):
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=2)
    if end == "kill":
        child = subprocess.run([sys.executable, "-m", __name__, tmp_path], check=False)
        assert child.returncode == -signal.SIGKILL
    else:
        control = weft.Control()
        left = resumed(tmp_path, stored(tmp_path, pruner=pruner), control=control, on_event=after(4, control.preempt))
        assert "preempted" in left.statuses
    study = stored(tmp_path, pruner=pruner)
    before = len(study.trials)
    assert 3 <= before < 8
    assert study.get_trials(states=(State.RUNNING,))
    result = resumed(tmp_path, study, resume=True)
    check_whole(study, result)
    check_whole(stored(tmp_path), resumed(tmp_path, study, resume=True))


def test_a_run_without_a_folder_leaves_no_trial_running():
    study, control = new_study(), weft.Control()
    search(study, tiny_graph(), control=control, on_event=after(1, control.cancel, "progress"), epochs=400)
    assert study.trials
    assert not study.get_trials(states=(State.RUNNING,))


def test_the_report_has_the_importance_of_settings(tmp_path):
    study = new_study()
    space = {"lr": weft.loguniform(1e-5, 1e-1), "seed": weft.uniform(0, 9)}
    result = search(study, "demo", 30, 10, space, out=tmp_path)
    assert sum(result.importance.values()) == pytest.approx(1)
    assert set(result.importance) == {"lr", "seed"}
    assert "PED-ANOVA of the study" in (tmp_path / "report.html").read_text()
    assert weft.read(tmp_path).importance == pytest.approx(result.importance)


@pytest.mark.parametrize(
    ("study", "message"),
    [
        (optuna.create_study(directions=["maximize", "minimize"]), "has 2 objectives"),
        (optuna.create_study(direction="minimize"), "is to minimize its values, which are val_accuracy here"),
    ],
)
def test_studies_that_do_not_go_with_the_metric(study, message):
    with pytest.raises(weft.SpecError, match=message):
        search(study, tiny_graph())
    assert not study.trials


def after(count, act, kind="checkpoint"):
    """A listener that acts at an event of a kind."""
    seen = []

    def listen(event):
        if event.kind == kind:
            seen.append(event)
            if len(seen) == count:
                act()

    return listen


if __name__ == "__main__":
    from pathlib import Path

    folder = Path(sys.argv[1])
    kill = after(4, lambda: os.kill(os.getpid(), signal.SIGKILL))
    resumed(folder, stored(folder, pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=2)), on_event=kill)
