"""What is said of a plan is the plan: its line among the ways to train, its schedule, its memory, its mode."""

from __future__ import annotations

from dataclasses import replace

import pytest

import weft
from weft.core.cost import Cost
from weft.core.division import Division
from weft.core.errors import DoesNotFitError, SpecError
from weft.core.placement import DataPlacement
from weft.core.plan import Plan
from weft.core.settings import MOST_PICKS, read_fanout
from weft.core.task import MOST
from weft.core.units import parse_bytes, show_bytes, show_seconds
from weft.engine import choosing as training_modes
from weft.engine.choosing import faster_way
from weft.engine.estimator import Estimate
from weft.engine.plan import explained, explanation, schedules
from weft.planner.cost.memory import MemoryEstimate
from weft.planner.division.simulator import Simulation
from weft.planner.division.ways import Way
from weft.planner.report.plan_text import would_do

ABOUT = {"layers": 3, "hidden": 256, "mode": "sampled", "fanout": [15, 10, 5], "batch": 1024, "epochs": 10}
PAPERS = weft.Task(graph="shape:ogbn-papers100M", model="sage", **ABOUT)
PRODUCTS = weft.Task(graph="shape:ogbn-products", model="sage", **ABOUT)
DEMO = {"graph": "demo", "hidden": 16, "epochs": 3}


@pytest.fixture(scope="module")
def reports():
    return {
        "hosted": weft.plan(PRODUCTS, machine="h200", placement=weft.Placement(features="host", topology="host")),
        "cached": weft.plan(PRODUCTS, machine="h200", placement=weft.Placement(cache="200MiB", features="cached")),
        "16GiB": weft.plan(PAPERS, machine="h200", budget="16GiB"),
        "60GiB": weft.plan(PAPERS, machine="h200", budget="60GiB"),
    }


@pytest.fixture(scope="module")
def ways(reports):
    return {name: explained(report)["group 1"] for name, report in reports.items()}


NAMES = ["hosted", "cached", "16GiB", "60GiB"]


@pytest.mark.parametrize("name", NAMES)
def test_the_marked_way_is_the_plan(reports, ways, name):
    (group,) = reports[name].groups
    one = ways[name]
    assert one.taken.placement == group.plan.places
    assert one.taken.division == group.plan.division
    assert (one.taken.seconds, one.taken.device_bytes) == (group.cost.epoch_seconds, group.cost.total_bytes)
    (line,) = [line for line in one.lines("group 1", reports[name].budget) if line.startswith("  > ")]
    assert f"{show_seconds(group.cost.epoch_seconds)} per epoch and task, {show_bytes(group.cost.total_bytes)}" in line
    assert group.plan.division.words() in line


@pytest.mark.parametrize("name", NAMES)
def test_no_other_way_is_faster_that_could_be_taken(reports, ways, name):
    one = ways[name]
    room = reports[name].budget
    free = [way for way in one.others if way.device_bytes <= room and not way.condition]
    assert free
    assert all(way.seconds >= one.taken.seconds for way in free)


def test_the_others_keep_to_the_options(ways):
    hosted, cached = ways["hosted"], ways["cached"]
    free = [way.placement for way in hosted.others if not way.condition]
    assert {(place.features, place.topology) for place in free} == {("host", "host")}
    free = [way.placement for way in cached.others if not way.condition]
    assert {place.cache_bytes for place in free} == {parse_bytes("200MiB")}


def test_ways_are_in_order_and_those_that_do_not_fit_say_so(reports, ways):
    report, one = reports["16GiB"], ways["16GiB"]
    lines = [line for line in one.lines("group 1", report.budget) if "per epoch and task" in line]
    ordered = sorted((one.taken, *one.others), key=lambda way: way.seconds_per_task)
    assert [way.words() in line for way, line in zip(ordered, lines, strict=True)] == [True] * len(ordered)
    large = [way.device_bytes > report.budget for way in ordered]
    assert ["does not fit into 16.0 GiB" in line for line in lines] == large
    assert any(large)


@pytest.mark.parametrize("name", ["hosted", "16GiB"])
def test_the_schedule_is_that_of_the_plan(reports, name):
    (simulation,) = schedules(reports[name]).values()
    assert simulation.division == reports[name].plans[0].division


def test_nothing_is_busy_for_more_than_all_of_the_time():
    busy = {"gpu": 1.05, "cpu": 4.1, "pcie": 0.5}
    used = Simulation(Division(1, 1, workers=4), 100, 1.0, busy, ()).utilisation()
    assert used == {"gpu": 1.0, "cpu": 1.0, "pcie": 0.5}


@pytest.mark.parametrize(
    ("settings", "machine"),
    [
        ({"model": "sage", "mode": "sampled", "fanout": [5, 3], "batch": 32}, "h200"),
        ({"model": "gcn"}, "h200"),
        ({"model": "sage", "mode": "sampled", "fanout": [5, 3], "batch": 32}, "cpu"),
    ],
)
def test_a_plan_without_divided_batches_has_no_schedule(settings, machine):
    report = weft.plan(weft.Task(**DEMO, **settings), machine=machine)
    assert report.plans[0].division is None
    with pytest.raises(SpecError, match="no group has batches that a host and a GPU prepare together"):
        schedules(report)
    (line,) = [line for line in explanation(report).splitlines() if line.startswith("  > ")]
    assert show_seconds(report.groups[0].cost.epoch_seconds) in line


def test_batches_of_a_task_that_trains_on_the_whole_graph_need_a_setting():
    (one,) = explained(weft.plan(weft.Task(**DEMO, model="gcn"), machine="cpu")).values()
    assert not one.taken.task.sampled
    assert {way.condition for way in one.others if way.task.sampled} == {"mode='sampled'"}


def test_members_of_a_stack_are_explained_together():
    tasks = [PRODUCTS.with_values(lr=lr, name=f"{lr}") for lr in (0.1, 0.2)]
    report = weft.plan(tasks, machine="h200", placement=weft.Placement(features="host"))
    (group,) = report.groups
    (one,) = explained(report).values()
    assert one.taken.members == 2
    assert one.taken.seconds_per_task == group.cost.epoch_seconds / 2


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_of_memory_add_up_to_it(reports, name):
    (group,) = reports[name].groups
    assert sum(group.cost.bytes.values()) == pytest.approx(group.cost.peak_bytes, rel=1e-3)


def test_edges_in_host_memory_are_no_part_of_the_device(reports):
    (group,) = reports["16GiB"].groups
    assert group.plan.places.topology == "host"
    assert group.cost.bytes["graph"] < parse_bytes("1GiB")  # 6 GiB of edges
    assert not any("1,615,685,872" in one for one in group.at_peak)


# ---- which of the ways is taken ------------------------------------------------------------------------

HOST = DataPlacement("host", "gpu")
PLAN = Plan(("a",), device="cuda", mode="sampled", placement=replace(HOST, features="cached", cache_bytes=9))


def _way(seconds: float, place: DataPlacement = HOST, division: Division | None = None) -> Way:
    return Way(PRODUCTS, place, Cost(), 10, seconds=seconds, division=division)


def _taken(*ways: Way, planned: float = 10.0) -> Way | None:
    estimate = Estimate(Cost(seconds={"gpu": planned}), MemoryEstimate(0, 0), None, ())
    return faster_way(ways, PLAN, estimate)


def test_a_division_that_a_profile_has_to_try_is_taken_where_things_lie():
    divided = _way(11.0, division=Division(1, 1))
    assert _taken(_way(10.0), divided) is divided
    assert _taken(_way(8.0), divided) is None


def test_one_side_is_taken_where_it_is_faster_than_what_was_planned():
    elsewhere = _way(8.0, replace(HOST, topology="host"))
    divided = _way(9.0, division=Division(1, 1))
    assert _taken(_way(10.0), elsewhere) is elsewhere
    assert _taken(_way(10.0), elsewhere, divided) is elsewhere
    assert _taken(_way(10.0), replace(elsewhere, seconds=9.5), divided) is divided
    assert _taken(_way(10.0), elsewhere, planned=7.0) is None


# ---- the whole graph or batches, and what does not fit --------------------------------------------------

QUIET = {"progress": False, "device": "cpu"}
WHOLE = {"graph": "shape:ogbn-products", "model": "sage", "layers": 3, "hidden": 256}
PLACES = [{"features": "host"}, {"topology": "host"}, {"cache": "1MiB"}, {"cache_policy": "degree"}]


@pytest.mark.parametrize("options", PLACES)
def test_places_do_not_turn_a_task_into_a_sampled_one(options):
    task = weft.Task(graph="demo", model="gcn", hidden=16, epochs=3)
    words = "would have no effect: task 'gcn' trains on the whole graph"
    with pytest.raises(SpecError, match=words):
        weft.plan(task, machine="h200", options=weft.RunOptions.of(**options))
    with pytest.raises(SpecError, match=words):
        weft.plan(task.with_values(mode="full"), machine="h200", options=weft.RunOptions.of(**options))
    if "features" in options:
        with pytest.raises(SpecError, match=words):
            weft.run(task, options=weft.RunOptions.of(**options), **QUIET)


@pytest.mark.parametrize("options", [{}, {"features": "host"}])
def test_what_does_not_fit_is_sampled_and_says_why(options):
    plan = weft.plan(weft.Task(**WHOLE), machine="h200", options=weft.RunOptions.of(budget="12GiB", **options)).plans[0]
    assert plan.mode == "sampled"
    assert plan.places.features == options.get("features", plan.places.features)
    (told,) = [reason for reason in plan.why if reason.startswith("sampled: ")]
    assert told.startswith("sampled: the whole graph does not fit into 12.0 GiB; 193 steps per epoch")
    asked = weft.plan(weft.Task(**WHOLE, mode="sampled"), machine="h200", budget="12GiB").plans[0]
    assert any(reason.startswith("sampled: mode='sampled' is set; ") for reason in asked.why)


def test_a_cache_that_is_too_large_is_named():
    with pytest.raises(SpecError, match=r"cache=13\.0 GiB is larger than the budget of 12\.0 GiB"):
        weft.plan(weft.Task(**WHOLE), machine="h200", budget="12GiB", placement=weft.Placement(cache="13GiB"))


def test_a_run_says_so_as_well(monkeypatch):
    monkeypatch.setattr(training_modes, "needs_sampling", lambda *_: True)
    result = weft.run(weft.Task(graph="demo", model="sage", hidden=8, epochs=1), budget="1GiB", **QUIET)
    assert any(reason.startswith("sampled: the whole graph does not fit into 1.00 GiB") for reason in result.plan.why)


@pytest.mark.parametrize(
    ("size", "words"), [(1, "1B"), (65 << 10, "65KiB"), ((65 << 20) + 1, "66MiB"), ((6 << 30) + 5, "6145MiB")]
)
def test_a_budget_is_never_rounded_down(size, words):
    assert would_do(size) == f"a budget of {words} would do on this machine"


def test_a_budget_that_is_too_small_says_which_would_do():
    task = weft.Task(**WHOLE, mode="sampled", name="a")
    report = weft.plan(task, machine="h200", budget="1GiB")
    (told,) = [note for note in report.notes if note.startswith("a budget of ")]
    assert weft.plan(task, machine="h200", budget=told.split()[3]).fits
    with pytest.raises(DoesNotFitError, match=rf"of 1\.00 GiB: does not fit; .*{told}"):
        weft.run(report, progress=False)
    task = weft.Task(graph="demo", model="sage", hidden=16, mode="sampled", epochs=1, name="a")
    with pytest.raises(DoesNotFitError, match=r"task 'a' needs .* does not fit; a budget of [0-9]+KiB would do"):
        weft.run(task, budget="1MiB", **QUIET)


def test_a_saved_plan_names_the_budget_in_words():
    task = weft.Task(graph="demo", model="sage", hidden=16, mode="sampled", epochs=1)
    report = weft.plan(task, machine="cpu")
    with pytest.raises(DoesNotFitError, match=r"raise the budget, or plan again for 1\.00 MiB"):
        weft.run(report, budget="1MiB", **QUIET)


def test_the_limit_is_that_of_other_counts():
    assert MOST_PICKS == MOST
    assert read_fanout([MOST_PICKS, -1]) == (MOST_PICKS, -1)


@pytest.mark.parametrize("hop", [10**12, [1, MOST_PICKS + 1], {"each": 10**8}, {"each": 2, "1": 10**9}])
def test_more_are_refused(hop):
    with pytest.raises(SpecError, match=r"task 'a': fanout=.* are more than 10,000,000; -1 takes all"):
        weft.Task(graph="demo", model="rgcn", name="a", mode="sampled", fanout=[hop, 3])


def test_a_group_of_one_is_the_task_alone():
    """Also where its cache and its division are chosen for the group."""
    settings = {"graph": "shape:ogbn-papers100M", "model": "sage", "mode": "sampled", "layers": 3, "hidden": 256}
    report = weft.plan(weft.Task(**settings, fanout=[15, 10, 5]), machine="h200", budget="24GiB")
    assert report.groups[0].plan.division is not None
    assert report.tasks[0].cost == report.groups[0].cost
