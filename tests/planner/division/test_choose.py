"""The choice is the fastest that fits; what does not fit or needs a setting is named, not taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.division.cases import times
from weft.core.cost import Cost
from weft.core.graph_stats import GraphStats
from weft.core.placement import DataPlacement
from weft.core.task import Task
from weft.planner.division import choose as choose_module
from weft.planner.division.choose import BESIDE_WAITING, Search, Setup, batch_bytes, choose, elsewhere, may_have_buckets
from weft.planner.machine_profiles import profile

GB = 10**9
STATS = GraphStats(
    "g", 2_000_000, 60_000_000, num_features=100, num_classes=10, symmetric=True, num_train=200_000, max_degree=5000,
    degree_histogram=(0, 1000, 10_000, 100_000, 500_000, 800_000, 400_000, 150_000, 30_000, 8_000, 900, 90, 10),
)  # fmt: skip
HOST, GPU = DataPlacement("host", "host", overlap=True), DataPlacement()


def task(**changes) -> Task:
    usual = {"model": "sage", "mode": "sampled", "fanout": [15, 10, 5], "batch": 1024}
    return Task(graph="g", layers=3, **{**usual, **changes})


def setup(placement=HOST, bytes=4 * GB, seconds=0.4, **changes) -> Setup:
    training = Cost(seconds={"gpu": seconds}, phases={"forward": seconds})
    return Setup(changes.pop("task", task()), placement, training, bytes, **changes)


def chosen(setups, budget=12 * GB, **options):
    return choose(setups, STATS, profile("h200"), budget, **options)


def test_features_on_the_gpu_are_fastest_if_they_fit():
    found = chosen([setup(GPU, 10 * GB), setup()])
    assert found.best.setup.placement == GPU
    assert found.best.division is None
    found = chosen([setup(GPU, 100 * GB), setup()])
    assert found.best.setup.placement == HOST
    assert "faster, but does not fit into" in found.why[1]


def test_measured_phases_decide_over_predicted_ones():
    slow_gpu = times(host=0.14, dma=0.004, sample=0.002, uva=0.01, train=0.002, bytes=GB // 10)
    found = chosen([setup()], measured=lambda one: slow_gpu)
    assert found.best.division.divided
    assert found.best.measured
    assert found.best.division.beside
    assert any("busy meanwhile" in one for one in found.why)
    slow_host = times(host=500.0, dma=0.004, sample=0.001, uva=0.002, train=0.02)
    assert chosen([setup()], measured=lambda one: slow_host).best.division is None


def test_buffers_and_pinned_memory_keep_to_the_budget():
    slow_gpu = times(host=0.14, dma=0.004, sample=0.002, uva=0.01, train=0.002)
    found = chosen([setup()], measured=lambda one: slow_gpu)
    assert found.best.device_bytes <= 12 * GB
    assert found.best.host_bytes <= 0.25 * profile("h200").host.memory_bytes
    waiting = found.best.division.device_buffer
    assert found.best.device_bytes == 4 * GB + (waiting + BESIDE_WAITING) * batch_bytes(task(), STATS)
    tight = chosen([setup()], budget=4 * GB + 1000, measured=lambda one: slow_gpu)
    assert tight.best.division is None  # no room for a buffer


def test_ways_that_leave_no_room_for_batches_take_no_place_from_those_that_do():
    """They have the larger caches, and so the lower bounds."""
    budget, size = 12 * GB, batch_bytes(task(), STATS)
    cached = [replace(HOST, features="cached", cache_bytes=(6 - share) * GB) for share in range(4)]
    full = [setup(place, bytes=budget - size) for place in cached]
    slow_gpu = times(host=0.14, dma=0.004, sample=0.002, uva=0.01, train=0.002)
    leaves_room = setup(bytes=budget - (BESIDE_WAITING + 2) * size)
    found = chosen([*full, leaves_room], budget, measured=lambda one: slow_gpu)
    assert found.best.division is not None
    assert found.best.division.device_buffer == 2
    assert found.best.device_bytes <= budget
    assert Search(STATS, profile("h200"), budget, lambda one: None).device_buffer(full[0]) == 0


def test_what_needs_a_setting_is_a_runner_up():
    faster = setup(GPU, 8 * GB, 0.1, task=task(precision="bf16"), condition="precision='bf16'")
    found = chosen([setup(GPU, 10 * GB), faster])
    assert found.best.setup.task.precision == "fp32"
    assert "needs precision='bf16'" in found.runners_up[0].words()


def test_ways_that_need_a_setting_take_no_place_from_those_that_need_none():
    """Faster ones that cannot be taken must not keep the division that can be from being simulated."""
    slow_gpu = times(host=0.14, dma=0.004, sample=0.002, uva=0.01, train=0.002, bytes=GB // 10)
    faster = times(host=0.07, dma=0.002, sample=0.001, uva=0.005, train=0.001, bytes=GB // 20)
    asked = task(precision="bf16")
    others = [setup(HOST, size * GB, 0.2, task=asked, condition="precision='bf16'") for size in (3, 4, 5)]
    phases = lambda one: faster if one.condition else slow_gpu  # noqa: E731
    alone, beside = chosen([setup()], measured=phases), chosen([setup(), *others], measured=phases)
    assert alone.best.division.divided
    assert beside.best.division == alone.best.division
    assert beside.best.seconds == alone.best.seconds
    assert beside.runners_up[0].setup.condition  # still named


def test_what_was_simulated_is_not_simulated_again(monkeypatch):
    """A search goes on with a setup more after its dry run."""
    search = Search(STATS, profile("h200"), 12 * GB, lambda one: None)
    setups, runs = [setup(), setup(bytes=5 * GB)], []
    first = chosen(setups, search=search)
    plain = choose_module.partition
    monkeypatch.setattr(choose_module, "partition", lambda *given: runs.append(given) or plain(*given))
    again = chosen(setups, search=search)
    assert runs == []
    assert (again.best, again.runners_up) == (first.best, first.runners_up)
    chosen([*setups, setup(bytes=3 * GB)], search=search)
    assert runs


def test_tasks_that_share_batches_are_compared_per_task():
    found = chosen([setup(GPU, 6 * GB, 0.4), setup(GPU, 9 * GB, 1.0, members=8)])
    assert found.best.setup.members == 8
    assert found.best.seconds_per_task == pytest.approx(found.best.seconds / 8)


def test_the_whole_graph_is_preferred_where_the_caller_says_so():
    whole = setup(GPU, 8 * GB, 50.0, task=Task(graph="g", model="sage"))
    found = chosen([setup(GPU, 8 * GB), whole], prefer=lambda one: not one.setup.task.sampled)
    assert found.best.setup is whole
    assert found.best.words().startswith("whole graph")


def test_batches_of_their_own_sizes_are_prepared_in_turn():
    slow_gpu = times(host=0.14, dma=0.004, sample=0.002, uva=0.01, train=0.002)
    found = chosen([setup(captured=False)], measured=lambda one: slow_gpu)
    assert not found.best.division.beside
    assert "steps not captured" in found.best.words()


def test_what_was_not_dry_run_is_compared_but_not_taken():
    base = setup(HOST, 4 * GB, 0.4)
    near = elsewhere(base, GPU, STATS)
    assert near.device_bytes == 4 * GB + 2_000_000 * 400 + 4 * 60_000_000 - batch_bytes(task(), STATS)
    found = chosen([base, near])
    assert found.best.setup is base
    assert any("about" in one.figures() for one in found.runners_up)
    assert found.contender.setup is near  # which a dry run of its own may make the best


def test_only_what_would_be_taken_is_a_contender():
    base = setup(GPU, 4 * GB, 0.4)
    assert chosen([base, elsewhere(base, HOST, STATS)]).contender is None  # slower
    assert chosen([setup(), elsewhere(setup(), GPU, STATS)], budget=4 * GB).contender is None  # too large
    whole = setup(GPU, 8 * GB, 50.0, task=Task(graph="g", model="sage"))
    found = chosen([whole, elsewhere(setup(), GPU, STATS)], prefer=lambda one: not one.setup.task.sampled)
    assert found.contender is None
    assert chosen([setup(bytes=50 * GB), elsewhere(base, HOST, STATS)]).contender is not None  # nothing else fits


def test_a_second_buffer_is_counted_elsewhere():
    base = setup(GPU, 4 * GB, 0.4)
    moved = elsewhere(base, HOST, STATS).device_bytes - base.device_bytes
    assert moved == batch_bytes(task(), STATS) - 2_000_000 * 400 - 4 * 60_000_000


def test_if_nothing_fits_the_smallest_is_said_not_to():
    found = chosen([setup(bytes=50 * GB), setup(GPU, 90 * GB)], budget=GB)
    assert found.best.device_bytes == 50 * GB
    assert "nothing that was tried fits" in found.why[0]


PRODUCTS = {"matmul": 0.7, "pointwise": 0.25, "spmm": 0.05}  # a step that padding lengthens


def padded_setup(epochs: int = 200, **families) -> Setup:
    training = Cost(seconds={"gpu": 8.0}, phases={"forward": 8.0}, families=families or PRODUCTS)
    return Setup(task(epochs=epochs, fanout=[25, 20, 10]), HOST, training, 4 * GB)


def slow_training(one: Setup):
    """Only batches of one size were measured."""
    return times(host=0.3, dma=0.004, sample=0.001, uva=0.002, train=0.04) if one.buckets == 1 else None


def test_several_sizes_of_batches_where_padding_costs_most():
    found = chosen([padded_setup()], budget=80 * GB, measured=slow_training)
    assert found.best.division.buckets > 1
    assert f"padded to one of {found.best.division.buckets} sizes" in found.best.words()
    assert "more to record" in found.why[-1]
    assert not found.best.measured  # phases of these sizes are to be measured before they are trusted
    one_size = next(one for one in found.runners_up if one.setup.padding is None)
    assert found.best.seconds < 0.9 * one_size.seconds


def test_recordings_do_not_repay_in_few_epochs_and_edges_do_not_pad():
    short = chosen([padded_setup(epochs=1)], budget=80 * GB, measured=lambda one: times(train=0.0004, uva=0.0002))
    assert short.best.setup.padding is None
    followed = chosen([padded_setup(spmm=1.0)], budget=80 * GB, measured=slow_training)
    assert followed.best.setup.padding is None
    assert "no less busy" in followed.why[-1]


def test_sizes_that_save_too_little_are_named():
    little = chosen([padded_setup(spmm=0.9, matmul=0.1)], budget=80 * GB, measured=slow_training)
    assert little.best.setup.padding is None
    assert "padded to one size" in little.why[-1]
    assert any(one.setup.padding is not None for one in little.runners_up)


def test_batches_with_relations_or_of_users_modules_have_one_size():
    apart = replace(padded_setup(), task=task(model="rgcn", fanout=[{"each": 3}, 5, 5]))
    for one in (apart, replace(padded_setup(), captured=False), replace(padded_setup(), rough=True)):
        assert not may_have_buckets(one, STATS)
