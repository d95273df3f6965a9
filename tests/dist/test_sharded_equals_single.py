"""Sharded = single: losses, metrics and weights of every model on 1 to 4 CPU ranks, with peers' slots poisoned."""

from __future__ import annotations

import pytest
import torch

from tests.dist import cases
from tests.dist.cases import CPU, Case, TwoBranches, train_alone
from weft.core.task import Task
from weft.dist.launch import start_ranks

RANKS = (1, 2, 3, 4)
LONG = {"epochs": 20}  # of the models that users train most


def task(model="gcn", graph="tiny", **changes) -> Task:
    given = {"epochs": 10, "lr": 0.05, **changes}
    if isinstance(model, str):
        given = {"hidden": 8, **given}
    return Task(graph=graph, model=model, **given)


CASES = [
    Case("gcn", (task("gcn", **LONG),), **LONG),
    Case("gcn first layer once", (task("gcn", dropout=0.0),), first_layer="once"),
    Case("gcn input dropout", (task("gcn", input_dropout=0.4),)),
    Case("sage", (task("sage", **LONG),), **LONG),
    Case("sage max", (task("sage", aggregator="max", dropout=0.0),)),
    Case("gin batch norm", (task("gin", norm="batch", **LONG),), **LONG),
    Case("gin learned eps", (task("gin", model_args={"train_eps": True}),)),
    Case("gat", (task("gat", heads=2, **LONG),), **LONG),
    Case("gat residual no dropout", (task("gat", heads=2, dropout=0.0, residual=True),)),
    Case("gatv2", (task("gatv2", heads=2),)),
    Case("weights", (task("gcn"),), graph="weighted"),
    Case("sparse features", (task("gcn", input_dropout=0.3),), graph="sparse"),
    Case("many labels", (task("sage", metric="f1_macro"),), graph="multilabel"),
    Case("a user's module", (task(TwoBranches, **LONG),), **LONG),
    Case("hub", (task("gcn", "hub"),), graph="hub"),
    Case("hub attention", (task("gat", "hub", heads=2),), graph="hub"),
    Case("directed, some ranks without training rows", (task("gin", "directed", norm="batch"),), graph="directed"),
    Case("directed loops", (task("gcn", "directed", norm="layer"),), graph="directed"),
    Case("stacked", tuple(task("gcn", seed=seed, lr=0.02 * (seed + 1), dropout=0.2 * seed) for seed in range(3))),
    Case("stacked batch norm", tuple(task("gin", seed=seed, norm="batch") for seed in range(2))),
    Case("stacked attention", tuple(task("gat", heads=2, seed=seed) for seed in range(2))),
    Case("stacked widths", tuple(task("sage", seed=seed, hidden=4 + 4 * seed) for seed in range(2))),
]
EMPTY = {
    1: (0, 60),
    2: (0, 60, 60),
    3: (0, 0, 7, 60),
    4: (0, 25, 25, 26, 60),
}


def cases_for(ranks: int) -> list[Case]:
    bounds = EMPTY[ranks]
    uneven = [
        Case(f"uneven and empty shards {model}", (task(model, norm="batch"),), bounds=bounds)
        for model in ("gcn", "gat")
    ]
    chosen = CASES if ranks in (2, 3) else [case for case in CASES if case.name in FEW]
    return chosen + uneven


FEW = ("gcn", "sage", "gin batch norm", "gat", "a user's module", "hub", "stacked", "directed loops")


@pytest.fixture(scope="module")
def alone() -> dict[str, dict]:
    torch.set_num_threads(1)
    return {}


@pytest.mark.parametrize(
    "ranks", [pytest.param(ranks, marks=[pytest.mark.rest] * (ranks != 3), id=str(ranks)) for ranks in RANKS]
)
def test_sharded_is_single(ranks, alone):
    chosen = cases_for(ranks)
    for case in chosen:
        if case.name not in alone:
            alone[case.name] = train_alone(case)
    with start_ranks(ranks, CPU, cases.work, (chosen,), timeout=120) as here:
        found = cases.train_all(here, chosen)
        every = here.gather_objects([(one["rows"], one["weights"]) for one in found])
        assert ranks == 1 or here.staging.exchanged_bytes > 0
    for place, case in enumerate(chosen):
        expected = alone[case.name]
        assert found[place]["stacks"] == expected["stacks"], case.name
        close = {"rtol": 2e-4, "atol": 2e-5, "equal_nan": True, "msg": lambda words, case=case: f"{case.name}: {words}"}
        torch.testing.assert_close(found[place]["rows"], expected["rows"], **close)
        torch.testing.assert_close(found[place]["weights"], expected["weights"], **close)
        for name, buffer in expected["buffers"].items():
            torch.testing.assert_close(found[place]["buffers"][name], buffer, **close)
        for rows, weights in (one[place] for one in every):
            assert torch.equal(weights, found[place]["weights"]), f"{case.name}: ranks hold different weights"
            assert torch.equal(rows.nan_to_num(-9), found[place]["rows"].nan_to_num(-9)), case.name


def test_two_runs_have_the_same_bits():
    chosen = [CASES[0], CASES[5], CASES[7]]
    runs = []
    for _ in range(2):
        with start_ranks(2, CPU, cases.work, (chosen,), timeout=120) as here:
            runs.append(cases.train_all(here, chosen))
            here.gather_objects(None)
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first["weights"], second["weights"])
        assert torch.equal(first["rows"], second["rows"])
