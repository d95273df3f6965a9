"""Plans place features and edges within the budget; runs do as planned, and refuse what makes no sense."""

from __future__ import annotations

import pytest

import weft
from weft.core.errors import SpecError

QUIET = {"progress": False, "device": "cpu"}
PRODUCTS = {"graph": "shape:ogbn-products", "model": "sage", "layers": 3, "hidden": 256, "mode": "sampled"}
SMALL = {"graph": "demo", "model": "sage", "hidden": 8, "epochs": 2, "mode": "sampled", "batch": 64, "fanout": [4, 3]}


def planned(**options):
    return weft.plan(weft.Task(**PRODUCTS), machine="h200", options=weft.RunOptions.of(**options))


def test_less_memory_moves_things_away():
    """Everything on the GPU, then evaluation in chunks, then features and edges in host memory."""
    seen = []
    for budget in ("16GiB", "8GiB", "4GiB"):
        report = planned(budget=budget)
        assert report.fits, budget
        seen.append(report.plans[0].places)
    roomy, chunked, tight = seen
    assert (roomy.features, roomy.topology, roomy.evaluation) == ("gpu", "gpu", "whole")
    assert (chunked.features, chunked.evaluation) == ("gpu", "layers")
    assert tight.features in ("cached", "host")
    assert not tight.overlap  # reads over PCIe beside training slow it down by more than they save


def test_a_stack_is_evaluated_by_layers_rather_than_cut():
    """A whole evaluation of one task fits, of four it does not: layer by layer all of them share every batch."""
    tasks = [weft.Task(**PRODUCTS, lr=lr, name=f"{lr}", eval_every=20) for lr in (0.1, 0.2, 0.3, 0.4)]
    alone = weft.plan(tasks[0], machine="h200", budget="16GiB")
    together = weft.plan(tasks, machine="h200", budget="16GiB")
    assert alone.plans[0].places.evaluation == "whole"
    assert [len(plan.members) for plan in together.plans] == [4]
    assert together.plans[0].places.evaluation == "layers"
    assert together.groups[0].cost.epoch_seconds < 4 * alone.groups[0].cost.epoch_seconds
    often = weft.plan([task.with_values(eval_every=1) for task in tasks], machine="h200", budget="16GiB")
    assert often.plans[0].places.evaluation == "whole"  # chunks of nodes every epoch would take longer


def test_caches_and_queues_are_counted():
    report = planned(budget="16GiB", cache="500MB", cache_policy="presampling", overlap=True)
    group = report.groups[0]
    assert group.plan.places.cache_bytes == 500_000_000
    assert group.cost.bytes["cache"] == 500_000_000
    assert group.cost.bytes["batch"] == pytest.approx(group.cost.bytes["queue"], rel=0.1)
    plain = planned(budget="16GiB", features="host", topology="gpu", overlap=True).groups[0]
    beside = [one.cost.bytes.get("prepared", 0) for one in (group, plain)]  # batches that the host has prepared
    assert group.cost.total_bytes - beside[0] == plain.cost.total_bytes - beside[1] + 500_000_000
    assert group.cost.epoch_seconds < plain.cost.epoch_seconds
    assert plain.cost.seconds["pcie"] > 0
    text = str(report)
    assert "cache 477 MiB" in text
    assert "queue of batches" in text
    assert "chosen by presampling, about" in text


def test_a_plan_with_its_placement_goes_through_a_file(tmp_path):
    report = weft.plan(weft.Task(**SMALL), machine="cpu", placement=weft.Placement(features="cached", cache="20KB"))
    (tmp_path / "plan.json").write_text(report.to_json())
    again = weft.read(tmp_path / "plan.json")
    assert again.plans[0].placement == report.plans[0].placement
    result = weft.run(again, **QUIET)
    assert 0 < result.plan.measured["feature_hit_rate"] < 1


def test_a_run_does_as_told(tmp_path):
    weft.load("demo").save(tmp_path / "graph")
    task = weft.Task(**{**SMALL, "graph": str(tmp_path / "graph")})
    plain = weft.run(task, **QUIET)
    events = []
    cached = weft.run(
        task,
        placement=weft.Placement(features="cached", cache="100KB"),
        out=tmp_path / "out",
        on_event=events.append,
        **QUIET,
    )
    assert cached.history["loss"] == plain.history["loss"]
    assert cached.plan.places.features == "cached"
    told = [event.data["feature_hit_rate"] for event in events if event.kind == "progress"]
    assert told[-1] == pytest.approx(cached.plan.measured["feature_hit_rate"])
    assert "rows from the feature cache" in (tmp_path / "out" / "report.html").read_text()


def test_places_do_not_turn_an_open_mode_into_a_sampled_one():
    task = weft.Task(graph="demo", model="sage", hidden=8, epochs=2)
    assert weft.plan(task, machine="cpu").plans[0].mode == "full"
    with pytest.raises(SpecError, match="features='host' would have no effect"):
        weft.plan(task, machine="cpu", placement=weft.Placement(features="host"))
    sampled = task.with_values(mode="sampled")
    assert weft.plan(sampled, machine="cpu", placement=weft.Placement(features="host")).plans[0].mode == "sampled"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"features": "nowhere"}, "features='nowhere' must be one of gpu, host, cached, disk"),
        ({"topology": 3}, "topology=3 must be one of gpu, host, cached, disk"),
        ({"features": "host", "cache": "1MB"}, "cache= needs features='cached', not features='host'"),
        ({"cache": "some"}, "cache='some' is not an amount of memory"),
        ({"sampler": "best"}, "sampler='best' must be one of default, reservoir, paper"),
        ({"sampler": "paper", "division": 0.5}, "sampler='paper' draws other neighbours than the host"),
        ({"sampler": "paper", "topology": "disk"}, "sampler='paper' needs edges that a GPU reads"),
        ({"cache": "20GiB", "budget": "16GiB"}, "cache=20.0 GiB is larger than the budget of 16.0 GiB"),
        ({"cache": "14GiB", "budget": "16GiB"}, "cache=14.0 GiB leaves 2.00 GiB of the budget of 16.0 GiB, but task"),
    ],
)
def test_mistakes_are_one_sentence(options, words):
    with pytest.raises(weft.InputError, match=words):
        planned(**options)


def test_a_sampler_is_planned_and_its_batches_are_not_divided_with_the_host(tmp_path):
    hosted = {"features": "host", "topology": "host"}
    report = planned(**hosted, sampler="paper")
    plan = report.plans[0]
    assert plan.places.sampler == "paper"
    assert plan.division is None
    assert planned(**hosted).plans[0].division is not None  # by the default sampler the host has a part
    assert "drawn by sampler='paper'" in str(report)
    (tmp_path / "plan.json").write_text(report.to_json())
    assert weft.read(tmp_path / "plan.json").plans[0].places == plan.places


def test_a_sampler_that_nothing_would_read():
    for task, machine, words in (
        (weft.Task(**SMALL), "cpu", "sampler='paper' needs a GPU; a CPU has the default sampler alone"),
        (weft.Task(graph="demo", mode="full"), "h200", "sampler='paper' would have no effect: task 'gcn' trains on"),
    ):
        with pytest.raises(SpecError, match=words):
            weft.plan(task, machine=machine, placement=weft.Placement(sampler="paper"))
    with pytest.raises(SpecError, match="sampler='paper' needs a GPU"):
        weft.run(weft.Task(**SMALL), placement=weft.Placement(sampler="paper"), **QUIET)
    options = weft.RunOptions(batches=[None], placement=weft.Placement(sampler="paper"))
    with pytest.raises(SpecError, match="sampler='paper' makes the batches on the GPU, and batches= elsewhere"):
        weft.run(weft.Task(**SMALL), options=options, **QUIET)


def test_places_need_sampled_training():
    with pytest.raises(SpecError, match="features='host' would have no effect: task 'gcn' trains on the whole graph"):
        weft.run(
            weft.Task(graph="demo", model="gcn", mode="full", epochs=1),
            placement=weft.Placement(features="host"),
            **QUIET,
        )
    report = weft.plan(weft.Task(**SMALL), machine="cpu")
    for option in ({"features": "host"}, {"cache_policy": "degree"}):
        with pytest.raises(SpecError, match="plan 'sage' has decided that already"):
            weft.run(report, placement=weft.Placement(**option), **QUIET)
