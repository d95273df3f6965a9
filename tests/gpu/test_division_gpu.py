"""Batches divided between the CPU and a GPU: the same bits from both, one captured step, and a profile."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import pytest
import torch

import weft
from weft.batches.division.source import DividedSampled
from weft.batches.pipeline import arrived
from weft.batches.sampled import Sampling
from weft.core.division import Division
from weft.core.placement import DataPlacement
from weft.core.plan import Plan
from weft.core.task import Task
from weft.engine.dividing import divided_source, profile_group
from weft.graph.generate import citation
from weft.runtime.group import GroupRun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DIVISIONS = [
    Division(1, 0, workers=3, host_buffer=6, device_buffer=3),
    Division(0, 2, device_buffer=2),
    Division(2, 2, workers=2, host_buffer=5, device_buffer=3, strategy="fixed"),
    Division(2, 2, workers=2, host_buffer=5, device_buffer=3),
]


@pytest.fixture(scope="module")
def graph():
    return citation(num_nodes=3000, num_edges=30000, num_features=12, num_classes=4, seed=1)


def task(model: str, **changes) -> Task:
    return Task(graph="g", model=model, **{"hidden": 8, "epochs": 3, "dropout": 0.5, "lr": 0.05, **changes})


def run_of(graph, division, model="sage", place="host", members=1, replay=True, overlap=True, cache=0):
    placement = DataPlacement("cached" if cache else place, place, cache_bytes=cache, overlap=overlap)
    tasks = [task(model, seed=seed) for seed in range(members)]
    names = tuple(map(str, range(members)))
    plan = Plan(names, device="cuda", replay=replay, mode="sampled", placement=placement)
    sampling = Sampling(fanout=(5, 3), batch=100, placement=placement)
    make = sampling if division is None else partial(DividedSampled, sampling=sampling, division=division)
    return GroupRun(tasks, graph, plan, torch.device("cuda", 0), make_source=make)


def rows(update) -> list[float]:
    return [value for row in update.rows for value in row]


@pytest.mark.parametrize(("place", "cache"), [("host", 0), ("gpu", 0), ("host", 60_000)])
def test_both_sides_make_the_same_batch_bit_for_bit(graph, place, cache):
    source = divided_source(run_of(graph, DIVISIONS[2], place=place, cache=cache))
    for seeds in source.seeds()[:3]:
        packed = source.divided.host.prepare(seeds)
        mine = arrived(source.divided.host.transfer(packed))
        source.divided.host.discard(packed)
        theirs = arrived(source.divided.device.read(source.divided.device.batch(seeds)))
        count = packed.count
        assert torch.equal(mine.nodes[:count], theirs.nodes[:count])
        assert torch.equal(mine.x, theirs.x)
        for (indptr, indices), (other, others) in zip(mine.hops, theirs.hops, strict=True):
            edges = int(indptr[-1])
            assert torch.equal(indptr, other)
            assert torch.equal(indices[:edges], others[:edges])


@pytest.mark.parametrize("model", ["gcn", "sage", "gat"])
def test_a_division_changes_no_number(graph, model):
    found = []
    for division in DIVISIONS:
        run = run_of(graph, division, model)
        found.append(rows(run.advance(3)[0]))
        assert run.recorded, run.notes
    assert found[0] == found[2] == found[3]
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-5)  # features' own captured fetch and step
    plain = run_of(graph, None, model)
    assert rows(plain.advance(3)[0]) == pytest.approx(found[0], rel=2e-3, abs=2e-3)


@pytest.mark.parametrize("model", ["gcn", "sage", "gat"])
@pytest.mark.parametrize("cache", [0, 60_000])
def test_batches_prepared_inside_of_steps_change_no_number(graph, model, cache):
    """The step that samples and reads its batch has the bits of one that gets it; also with some rows cached."""
    inside = Division(2, 2, workers=2, host_buffer=5, device_buffer=3, lead=3)
    found = []
    for division in (DIVISIONS[0], inside, replace(inside, lead=1)):
        run = run_of(graph, division, model, overlap=False, cache=cache)
        found.append(rows(run.advance(3)[0]))
        assert run.recorded, run.notes
        assert divided_source(run).divided.prepared["host"] > 0
    assert found[0] == found[1] == found[2]


def test_stacked_members_share_divided_batches(graph):
    together = run_of(graph, DIVISIONS[2], members=3)
    found = [rows(update) for update in together.advance(2)]
    alone = rows(run_of(graph, DIVISIONS[0]).advance(2)[0])
    assert found[0] == pytest.approx(alone, rel=2e-3, abs=2e-3)


def test_divisions_change_between_epochs_without_another_capture(graph):
    run = run_of(graph, DIVISIONS[2])
    found = rows(run.advance(1)[0])
    for division in (DIVISIONS[0], DIVISIONS[1]):
        divided_source(run).divide(division)
        found += rows(run.advance(1)[0])
    expected = rows(run_of(graph, DIVISIONS[0]).advance(3)[0])
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_poisoned_batches_harm_no_other(graph):
    source = divided_source(run_of(graph, DIVISIONS[2]))
    expected = [[t.clone() for t in arrived(source.divided.device.read(source.divided.device.batch(s))).tensors()]
                for s in source.seeds()]  # fmt: skip
    for item, before in zip(source.divided.run(source.seeds()), expected, strict=True):
        time.sleep(0.003)
        torch.cuda.synchronize()
        assert torch.equal(item.x, before[1])
        for tensor in item.tensors():
            tensor.fill_(7)


def test_the_profile_is_short_and_leaves_the_state_alone(graph):
    run = run_of(graph, DIVISIONS[2])
    begin = time.perf_counter()
    times = profile_group(run, workers=2)
    assert time.perf_counter() - begin < 60  # kernels are compiled in it
    assert set(times.phases) == {"batching_cpu", "transfer_pcie", "batching_gpu", "transfer_gpu", "training_gpu"}
    assert set(times.inside) == {"transfer_gpu", "transfer_pcie"}
    assert set(times.captured) == {"batching_gpu", "transfer_gpu", "training_gpu"}  # a whole captured step
    assert sum(one.mean for one in times.captured.values()) > 0
    expected = rows(run_of(graph, DIVISIONS[2]).advance(2)[0])
    assert rows(run.advance(2)[0]) == expected


def test_a_run_with_host_features_is_divided_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    notes = []
    about = {"mode": "sampled", "fanout": [5, 3], "batch": 64, "epochs": 3, "hidden": 16}
    result = weft.run(
        weft.Task(graph="demo", model="sage", **about),
        device="cuda",
        placement=weft.Placement(features="host", topology="host"),
        progress=False,
        on_event=lambda event: notes.append(event.data.get("message", "")) if event.kind == "note" else None,
    )
    divided = result.plan.division is not None
    assert any("predicted per epoch" in note for note in notes) == divided, (result.plan.why, notes)


SHARED = {"graph": "demo", "mode": "sampled", "fanout": [5, 3], "batch": 64, "epochs": 3, "hidden": 16}


@pytest.mark.parametrize("models", [("sage",), ("sage", "gcn")])
@pytest.mark.parametrize("how", [{"division": "elastic"}, {"division": "fixed"}, {"division": 0.5}, {"overlap": True}])
def test_who_prepares_batches_is_a_setting_and_changes_no_number(tmp_path, monkeypatch, models, how):
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    tasks = [weft.Task(model=model, name=model, **SHARED) for model in models]
    placement = weft.Placement(features="host", topology="host", **how)
    result = weft.run(tasks, device="cuda", placement=placement, progress=False)
    expected = weft.run(
        tasks, device="cuda", progress=False, options=weft.RunOptions(weave="off" if models[1:] else None)
    )
    (plan,) = result.plan
    if isinstance(how.get("division"), float):
        assert (plan.division.strategy, plan.division.kind) == ("fixed", "dual buffer")
    assert plan.places.overlap == ("overlap" in how)
    for mine, theirs in zip(result, expected, strict=True):
        assert mine.history["loss"] == pytest.approx(theirs.history["loss"], rel=2e-3, abs=2e-3)
