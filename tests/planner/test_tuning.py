"""Tuners: what they ask for, and which trials they end, without any training."""

from __future__ import annotations

import pytest

from weft.core.errors import SpecError
from weft.core.search_space import loguniform, uniform
from weft.core.sweep import Sweep
from weft.planner.tuning import Search, Tuner, trial_name


def search_of(trials=16, epochs=27, width=4, **settings):
    space = Sweep("cora", **(settings or {"lr": loguniform(1e-3, 1e-1)})).space()
    return Search(space, trials, epochs, width)


def train(tuner, search, score, seeds=()):
    """Train trials in ``width`` rows by epochs alone: ``score(settings, epoch)``; what each did, by its name."""
    tuner.begin(search)
    rows, trials, started = {}, {}, 0
    while True:
        for name in tuner.stop():
            assert name in rows, f"{name} does not run"
            del rows[name]
            trials[name]["status"] = "pruned"
            tuner.tell(name, {"status": "pruned", "epochs": trials[name]["epochs"]})
        free = search.width - len(rows)
        for settings in tuner.ask(free if tuner.copies else min(free, search.trials - started)):
            name, parent = trial_name(len(trials)), settings.get("parent")
            started += parent is None
            trials[name] = {"settings": settings, "epochs": rows[parent] if parent else 0, "status": "running"}
            rows[name] = trials[name]["epochs"]
        assert started <= search.trials
        if not rows:
            return trials
        for _ in range(tuner.every):
            for name in [name for name in rows if rows[name] < search.epochs]:
                rows[name] += 1
                trials[name]["epochs"] = rows[name]
                tuner.report(name, rows[name], {"score": score(trials[name]["settings"], rows[name])})
        for name in [name for name, epoch in rows.items() if epoch == search.epochs]:
            trials[name]["status"] = "finished"
            del rows[name]
            tuner.tell(name, {"status": "finished", "epochs": search.epochs})


def by_rate(settings, epoch):
    return settings["lr"]


@pytest.mark.parametrize("name", ["random", "asha", "hyperband", "halving", "pbt"])
def test_the_same_seed_asks_for_the_same_trials(name):
    runs = [train(Tuner.of(name, seed=seed), search_of(), by_rate) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    drawn = [trial["settings"]["lr"] for trial in runs[0].values() if "parent" not in trial["settings"]]
    assert len(drawn) == len(set(drawn)) == 16
    assert all(1e-3 <= rate <= 1e-1 for rate in drawn)


def test_random_search_does_not_depend_on_how_many_are_asked_for_at_once():
    searches = []
    for sizes in ([5, 1, 2], [1, 7]):
        tuner = Tuner.of("random", seed=3)
        tuner.begin(search_of())
        searches.append([settings for size in sizes for settings in tuner.ask(size)])
    assert searches[0] == searches[1]


def test_a_space_that_is_tried_out_ends_the_search():
    tuner = Tuner.of("random")
    tuner.begin(search_of(model=["gcn", "sage"], hidden=[8, 16]))
    assert len(tuner.ask(10)) == 4
    assert tuner.ask(10) == []


def test_asha_ends_what_is_not_among_the_best_of_those_that_came_as_far():
    tuner = Tuner.of("asha", eta=2, grace=2)
    trials = train(tuner, search_of(trials=32, epochs=16, width=8), by_rate)
    finished = [trial for trial in trials.values() if trial["status"] == "finished"]
    assert {trial["epochs"] for trial in trials.values()} <= {2, 4, 8, 16}
    assert sum(trial["epochs"] for trial in trials.values()) < 0.5 * 32 * 16
    best = max(trials.values(), key=lambda trial: trial["settings"]["lr"])
    assert best in finished


def test_asha_waits_for_an_evaluation_past_the_rung():
    tuner = Tuner.of("asha", eta=2, grace=2)
    tuner.begin(search_of(epochs=16, width=2))
    tuner.ask(2)
    assert tuner.stop() == []
    tuner.report("trial-000", 5, {"score": 0.1})
    tuner.report("trial-001", 5, {"score": 0.9})
    assert tuner.stop() == ["trial-000"]


def test_a_cohort_is_halved_when_all_of_it_have_come_to_a_rung():
    tuner = Tuner.of("halving", eta=2, grace=4, cohort=4)
    tuner.begin(search_of(trials=8, epochs=16, width=8))
    assert tuner.ask(3) == [], "not a whole cohort"
    assert len(tuner.ask(8)) == 4
    for number in range(3):
        tuner.report(trial_name(number), 4, {"score": float(number)})
    assert tuner.stop() == [], "one has not come so far"
    tuner.tell("trial-003", {"status": "diverged", "epochs": 2})
    assert tuner.stop() == ["trial-000"], "of three and one that diverged two stay"


def test_halving_keeps_the_best_of_every_cohort_to_the_end():
    trials = list(train(Tuner.of("halving", eta=2, grace=4, cohort=4), search_of(16, 16, 4), by_rate).values())
    for begin in range(0, 16, 4):
        cohort = sorted(trials[begin : begin + 4], key=by_rate_of)
        assert [trial["epochs"] for trial in cohort] == [4, 4, 8, 16]


def by_rate_of(trial):
    return trial["settings"]["lr"]


def test_cohorts_of_hyperband_get_smaller_and_stop_later():
    trials = list(train(Tuner.of("hyperband", eta=3, grace=3, cohort=9), search_of(13, 27, 9), by_rate).values())
    assert sorted(trial["epochs"] for trial in trials[:9]) == [3] * 6 + [9, 9, 27]
    assert {trial["epochs"] for trial in trials[9:]} <= {9, 27}, "the second cohort begins one rung later"


def test_population_based_training_copies_the_best_with_other_numbers():
    search = search_of(8, 20, 8, lr=loguniform(1e-3, 1e-1), hidden=[8])
    trials = train(Tuner.of("pbt", interval=5), search, by_rate)
    children = {name: trial["settings"] for name, trial in trials.items() if "parent" in trial["settings"]}
    assert len(children) == 3 * 2, "a quarter of eight, after 5, 10 and 15 of 20 epochs"
    for settings in children.values():
        before = trials[settings["parent"]]["settings"]["lr"]
        ratio = settings["lr"] / before
        assert any(abs(ratio - factor) < 1e-9 for factor in (1.2, 1 / 1.2)) or settings["lr"] in (1e-3, 1e-1)
        assert settings["hidden"] == 8
    assert sum(trial["epochs"] == 20 for trial in trials.values()) == 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tuner.of("ashaa"), "did you mean 'asha'"),
        (lambda: Tuner.of("asha", eta=1), "tuner: eta=1.0 must be above 1"),
        (lambda: Tuner.of("asha", factor=2), "tuner 'asha' has no setting 'factor'; it has eta, grace, seed"),
        (lambda: Tuner.of("halving", cohort=1), "tuner: cohort=1 must be at least 2"),
        (lambda: Tuner.of("pbt", share=0.8), "share=0.8 must be at most 0.5"),
        (lambda: Tuner.of("random", seed=-1), "tuner: seed=-1 must be at least 0"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(SpecError) as error:
        make()
    assert message in str(error.value)


def test_ranges_of_whole_numbers_stay_whole_and_inside():
    search = search_of(4, 20, 4, warmup=uniform(1, 5), lr=loguniform(1e-3, 1e-1))
    for trial in train(Tuner.of("pbt", interval=2, share=0.5), search, by_rate).values():
        assert trial["settings"]["warmup"] in range(1, 6)
