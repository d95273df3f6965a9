"""Which tasks train as one group: every task once, within its limits, and with a reason for each choice."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.errors import SpecError
from weft.core.graph_stats import GraphStats
from weft.core.plan import Plan
from weft.core.task import Task
from weft.planner.grouping.groups import group, plan_as_one_group
from weft.planner.grouping.stacks import cut_widths, waste

CORA = GraphStats("cora", 2_708, 10_858, 1_433, feature_nnz=49_216, num_classes=7, symmetric=True)
ARXIV = GraphStats("arxiv", 169_343, 2_332_486, 128, num_classes=40, symmetric=True)
PRODUCTS = GraphStats("products", 2_449_029, 123_718_280, 100, num_classes=47, symmetric=True)


def sweep(count: int = 4, start: int = 0, **values) -> list[Task]:
    """Tasks that differ in seed and rate alone."""
    model = values.get("model", "gcn")
    stem = model if isinstance(model, str) else "own"
    return [
        Task(graph="g", name=f"{stem}-{start + i}", seed=i, lr=0.01 * (i + 1), **values) for i in range(count)
    ]  # fmt: skip


def text(plans: list[Plan]) -> str:
    return "\n".join(str(plan) for plan in plans)


def names(plans: list[Plan]) -> list[tuple[str, ...]]:
    return [plan.members for plan in plans]


# ---- stacks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_numbers_do_not_keep_tasks_apart(device):
    tasks = [
        Task(graph="g", name="a"),
        Task(graph="g", name="b", lr=0.1, weight_decay=1e-3, dropout=0.0, seed=3, betas=(0.8, 0.9), eps=1e-7),
        Task(graph="g", name="c", label_smoothing=0.1, epochs=7, patience=2, schedule="cosine", warmup=1),
        Task(graph="g", name="d", optimizer="adamw", heads=4, aggregator="max", decay="first"),
    ]
    (plan,) = group(tasks, CORA, device)
    assert (plan.join, plan.members) == ("stacked", ("a", "b", "c", "d"))
    assert "4 tasks stacked, they differ only in" in text([plan])
    assert "optimizer, lr, weight_decay" in text([plan])


@pytest.mark.parametrize(
    "change",
    [{"precision": "bf16"}, {"feature_norm": "row"}, {"metric": "f1_macro"}, {"graph": "other"}],
)
def test_treatments_are_groups_of_their_own(change):
    tasks = [Task(graph="g", name="a"), Task(**{"graph": "g", "name": "b", **change}), Task(graph="g", name="c")]
    plans = group(tasks, CORA, "cuda")
    assert names(plans) == [("a", "c"), ("b",)]


def test_what_auto_stands_for_is_the_same_treatment():
    tasks = [Task(graph="g", name="a"), Task(graph="g", name="b", metric="accuracy", objective="multiclass")]
    assert names(group(tasks, CORA, "cpu")) == [("a", "b")]


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 3},
        {"model": "sage"},
        {"norm": "batch"},
        {"residual": True},
        {"optimizer": "sgd"},
        {"input_dropout": 0.5},
        {"eval_every": 2},
        {"decay": "first", "weight_decay": 1e-3},
    ],
)
def test_structures_are_stacks_of_their_own(change):
    tasks = [Task(graph="g", name="a"), Task(graph="g", name="b", **change)]
    assert names(group(tasks, CORA, "cpu")) == [("a",), ("b",)]
    (beside,) = group(tasks, CORA, "cuda")
    assert (beside.join, beside.stacks) == ("concurrent", ((0,), (1,)))
    (woven,) = group(tasks, CORA, "cuda", weave="merged")
    assert (woven.join, woven.stacks) == ("woven", ((0,), (1,)))
    assert names(group(tasks, CORA, "cuda", weave="off")) == [("a",), ("b",)]


SAMPLED = {"mode": "sampled", "fanout": [15, 10, 5], "batch": 1024, "layers": 3}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sampled_structures_share_batches_however_large_the_graph_is(device):
    tasks = [Task(graph="g", name=model, model=model, **SAMPLED) for model in ("sage", "gcn", "gat")]
    (shared,) = group(tasks, PRODUCTS, device)
    assert (shared.join, shared.stacks) == ("in turn", ((0,), (1,), (2,)))
    assert "sharing batches with sage of 3 layers x 1: sampled and fetched once" in text([shared])
    assert names(group(tasks, PRODUCTS, device, weave="off")) == [("sage",), ("gcn",), ("gat",)]
    whole = [Task(graph="g", name=model, model=model, layers=3) for model in ("sage", "gcn")]
    assert names(group(whole, PRODUCTS, device)) == [("sage",), ("gcn",)], "every kernel fills the device"


def test_sampled_structures_with_other_batches_do_not_share_them():
    tasks = [Task(graph="g", name=f"{model}", model=model, **SAMPLED) for model in ("sage", "gcn")]
    other = Task(graph="g", name="other", model="gat", **{**SAMPLED, "batch": 512})
    assert names(group([*tasks, other], PRODUCTS, "cuda")) == [("sage", "gcn"), ("other",)]
    assert len(group(tasks, PRODUCTS, "cuda", memory_of=len, budget=1.5)) == 2, "two of them do not fit"


def test_concurrent_can_be_requested_where_kernels_fill_the_device():
    tasks = [Task(graph="g", name=model, model=model) for model in ("sage", "gcn")]
    (plan,) = group(tasks, ARXIV, "cuda", weave="concurrent")
    assert plan.join == "concurrent"
    assert [plan.join for plan in group(tasks, ARXIV, "cuda")] == ["solo", "solo"]


def test_own_models_stack_by_identity():
    def one(size_in, size_out):
        return None

    def other(size_in, size_out):
        return None

    tasks = sweep(2, model=one) + sweep(2, start=2, model=other)
    plans = group(tasks, CORA, "cuda")
    assert names(plans) == [("own-0", "own-1"), ("own-2", "own-3")]
    assert "in a group of its own" in text(plans)
    assert "not known before it is captured" in text(group(tasks, CORA, "cuda", weave="merged"))


def test_models_that_compare_equal_are_still_two():
    class Factory:
        def __call__(self, size_in, size_out):
            return None

        def __eq__(self, other):
            return isinstance(other, Factory)

        __hash__ = None

    tasks = [Task(graph="g", name=name, model=Factory()) for name in "ab"]
    assert names(group(tasks, CORA, "cpu")) == [("a",), ("b",)]


def test_two_tasks_of_one_name_are_refused():
    with pytest.raises(SpecError, match="2 tasks are called 'gcn'; give each a name"):
        group([Task(graph="g"), Task(graph="g", lr=0.5)], CORA, "cpu")


def test_one_task_is_a_group_of_one():
    task = Task(graph="g", name="a")
    assert group([task], ARXIV, "cuda") == [plan_as_one_group([task], ARXIV, "cuda")]
    assert group([task], ARXIV, "cuda")[0].join == "solo"


# ---- padding -----------------------------------------------------------------------------------------


def widths(*hidden: int, **values) -> list[Task]:
    return [Task(graph="g", name=f"t{i}", hidden=h, **values) for i, h in enumerate(hidden)]


def test_widths_are_padded_where_launches_cost_more():
    (plan,) = group(widths(16, 32, 16, 32), CORA, "cuda")
    assert plan.join == "stacked"
    assert "widths 16, 32 padded with zeros to 32" in text([plan])


def test_widths_stay_apart_where_zeros_cost_more():
    plans = group(widths(16, 16, 1024), PRODUCTS, "cuda", weave="off")
    assert names(plans) == [("t0", "t1"), ("t2",)]
    assert "widths 16, 1024 not all padded to 1024" in text(plans)


def test_layer_norm_is_never_padded():
    plans = group(widths(16, 32, norm="layer"), CORA, "cpu")
    assert names(plans) == [("t0",), ("t1",)]
    assert "layer norm takes its mean over the whole width" in text(plans)
    assert names(group(widths(16, 16, norm="layer"), CORA, "cpu")) == [("t0", "t1")]


def test_a_single_layer_has_no_width_to_differ_in():
    (plan,) = group(widths(16, 1024, layers=1), PRODUCTS, "cuda", weave="off")
    assert plan.join == "stacked"


def cheapest(counts, cost, overhead):
    """Every way to cut, tried."""
    order = sorted(counts)
    best = float("inf")
    for bits in range(2 ** (len(order) - 1)):
        total, run = 0.0, []
        for place, width in enumerate(order):
            run.append(width)
            if place == len(order) - 1 or bits >> place & 1:
                total += sum(counts[w] for w in run) * cost(width) + overhead
                run = []
        best = min(best, total)
    return best


@given(
    counts=st.dictionaries(st.integers(1, 512), st.integers(1, 20), min_size=1, max_size=6),
    overhead=st.floats(0, 1e4),
    power=st.sampled_from([1.0, 1.5, 2.0]),
)
@settings(max_examples=60, deadline=None)
def test_runs_of_widths_are_the_cheapest(counts, overhead, power):
    def cost(width):
        return float(width) ** power

    runs = cut_widths(counts, cost, overhead)
    assert sorted(counts) == [width for run in runs for width in run]
    total = sum(sum(counts[w] for w in run) * cost(max(run)) + overhead for run in runs)
    assert total == pytest.approx(cheapest(counts, cost, overhead))


def test_waste_is_the_share_of_zeros():
    assert waste({1: 1, 2: 1}, float) == pytest.approx(0.25)
    assert waste({8: 5}, float) == 0.0


# ---- limits ------------------------------------------------------------------------------------------


def test_memory_cuts_groups_evenly():
    plans = group(sweep(10), CORA, "cuda", memory_of=lambda tasks: 100.0 * len(tasks), budget=450)
    assert [len(plan.members) for plan in plans] == [4, 3, 3]
    assert "10 tasks cut into stacks of at most 4: 5 of them need" in text(plans)


def test_reasons_speak_of_the_group_they_stand_in():
    widths = [*sweep(1, hidden=64), *sweep(1, start=1, hidden=60)]
    assert "padded with zeros" in text(group(widths, CORA, "cuda"))
    alone = group(widths, CORA, "cuda", memory_of=lambda tasks: 100.0 * len(tasks), budget=150)
    assert [len(plan.members) for plan in alone] == [1, 1]
    for plan in alone:
        assert "2 tasks cut into groups of one: 2 of them need" in text([plan])
        assert "stacked" not in text([plan])
        assert "padded with zeros" not in text([plan])
    for plan in group(sweep(10), CORA, "cuda", memory_of=lambda tasks: 100.0 * len(tasks), budget=450):
        assert f"{len(plan.members)} tasks stacked" in text([plan])


def test_many_widths_are_summed_up():
    many = [task for width in range(8, 40) for task in sweep(1, start=width, hidden=width, norm="layer")]
    assert "widths from 8 to 39 (32 of them) apart" in text(group(many, CORA, "cuda"))


def test_a_task_that_does_not_fit_says_so():
    plans = group(sweep(2), CORA, "cuda", memory_of=lambda tasks: 3 * 2.0**30 * len(tasks), budget=2**30)
    assert [plan.join for plan in plans] == ["solo", "solo"]
    assert "it does not fit even alone: 3.00 GiB of 1.00 GiB" in text(plans)


def test_small_graphs_make_large_groups():
    sizes = [max(len(p.members) for p in group(sweep(300), stats, "cuda")) for stats in (CORA, ARXIV, PRODUCTS)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] >= 64
    assert sizes[1] >= 16
    assert sizes[2] >= 4


# ---- weaving -----------------------------------------------------------------------------------------


def test_depths_share_a_gpu():
    tasks = [Task(graph="g", name=f"d{i}", layers=layers) for i, layers in enumerate((2, 3, 2, 4))]
    (plan,) = group(tasks, CORA, "cuda")
    assert (plan.join, plan.stacks) == ("concurrent", ((0, 2), (1,), (3,)))
    assert "neither fills the device" in text([plan])
    (plan,) = group(tasks, CORA, "cuda", weave="merged")
    assert (plan.join, plan.stacks) == ("woven", ((0, 2), (1,), (3,)))
    assert "operators can be matched" in text([plan])
    assert len(group(tasks, CORA, "cpu")) == 3


def test_a_large_graph_fills_the_device():
    tasks = sweep(4) + sweep(4, model="gin") + sweep(2, model="gat", heads=4)
    tasks = [task.with_values(layers=3) for task in tasks]
    plans = group(tasks, ARXIV, "cuda")
    assert {plan.join for plan in plans} == {"stacked"}
    assert "fills the device by itself" in text(plans)
    (plan,) = group(tasks, ARXIV, "cuda", weave="merged")
    assert plan.join == "woven"
    assert plan.first_layer == "once"
    assert [len(stack) for stack in plan.stacks] == [4, 4, 2]


def test_unlike_tasks_are_not_woven():
    tasks = [
        Task(graph="g", name="a", hidden=4, layers=2),
        Task(graph="g", name="b", model="gatv2", hidden=1024, layers=40),
    ]
    plans = group(tasks, CORA, "cuda", weave="merged")
    assert [plan.join for plan in plans] == ["solo", "solo"]
    assert "is below 0.4" in text(plans)


def test_full_stacks_are_not_woven():
    tasks = sweep(200) + sweep(200, model="gin")
    plans = group(tasks, CORA, "cuda")
    assert {plan.join for plan in plans} == {"stacked"}
    assert "times what fills the device" in text(plans)


def test_memory_bounds_woven_groups():
    tasks = sweep(2) + sweep(2, model="gin")
    plans = group(tasks, CORA, "cuda", memory_of=lambda tasks: float(len(tasks)), budget=3)
    assert [plan.join for plan in plans] == ["stacked", "stacked"]


def test_together_keeps_to_no_limit_of_size():
    plan = plan_as_one_group(sweep(300) + sweep(2, model="gat"), CORA, "cpu", weave="merged")
    assert plan.join == "woven"
    assert [len(stack) for stack in plan.stacks] == [300, 2]
    with pytest.raises(SpecError, match="must agree in graph, feature_norm, precision"):
        plan_as_one_group([Task(graph="g", name="a"), Task(graph="g", name="b", precision="bf16")], CORA, "cpu")


# ---- all of it ---------------------------------------------------------------------------------------


@st.composite
def task_lists(draw):
    made = []
    for place in range(draw(st.integers(1, 24))):
        model = draw(st.sampled_from(["gcn", "sage", "gin", "gat"]))
        made.append(
            Task(
                graph=draw(st.sampled_from(["g", "h"])),
                name=f"t{place}",
                model=model,
                layers=draw(st.integers(1, 4)),
                hidden=draw(st.sampled_from([8, 16, 64])),
                norm=draw(st.sampled_from([None, "batch", "layer"])),
                precision=draw(st.sampled_from(["fp32", "bf16"])),
                seed=place,
            )
        )
    return made


@given(
    tasks=task_lists(),
    stats=st.sampled_from([CORA, ARXIV, PRODUCTS]),
    device=st.sampled_from(["cpu", "cuda"]),
    room=st.integers(1, 30),
)
@settings(max_examples=60, deadline=None)
def test_every_task_once_within_the_budget_and_with_reasons(tasks, stats, device, room):
    plans = group(tasks, stats, device, memory_of=lambda some: float(len(some)), budget=room)
    assert sorted(name for plan in plans for name in plan.members) == sorted(task.label for task in tasks)
    place = {task.label: index for index, task in enumerate(tasks)}
    firsts = [place[plan.members[0]] for plan in plans]
    assert firsts == sorted(firsts)
    for plan in plans:
        assert len(plan.members) <= room
        assert plan.why
        assert plan.join == ("solo" if len(plan.members) == 1 else "concurrent" if plan.stacks else "stacked")
        slots = [slot for stack in plan.stack_members for slot in stack]
        assert sorted(slots) == list(range(len(plan.members)))
        assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
