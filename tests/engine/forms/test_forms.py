"""Forms of graphs that are remembered between processes: the same bits, found by content, checked, bounded."""

from __future__ import annotations

import os
import shutil
import sys
from collections import namedtuple

import pytest
import torch
from typer.testing import CliRunner

import weft
from weft.cli.app import app
from weft.engine import derived_cache as keep_forms
from weft.engine.derived_cache import LIMIT_VARIABLE, FormKeeper, FormStore, kept_forms
from weft.graph import generate
from weft.ops.csr.adjacency import Adjacency, content_digest

ARRAYS = {"indptr": torch.arange(5, dtype=torch.int32), "half": torch.randn(3, 2).bfloat16()}


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    monkeypatch.delenv(LIMIT_VARIABLE, raising=False)


@pytest.fixture
def store(tmp_path):
    return FormStore(tmp_path / "forms")


def put(store: FormStore, key: str = "a", arrays=ARRAYS, form: str = "self loops") -> None:
    store.put(key, arrays, "demo", form, 1.5)


def made(directed: bool = True, weighted: bool = False) -> weft.Graph:
    graph = generate.citation(300, 1500, 6, 3, directed=directed)
    if weighted:
        weight = torch.rand(graph.num_edges)
        adj = Adjacency(graph.adj.indptr, graph.adj.indices, weight=weight)
        graph = weft.Graph(adj, graph.x, graph.y, graph.train, graph.val, graph.test, name="weighted")
    return graph


def all_worth(monkeypatch) -> None:
    """Also the forms of small graphs, made in no time, are remembered."""
    for name in ("LEAST_EDGES", "LEAST_SECONDS"):
        monkeypatch.setattr(keep_forms, name, 0)
    monkeypatch.setattr(keep_forms, "READ_RATE", 1e12)


def same(one: Adjacency, other: Adjacency) -> bool:
    pairs = ((getattr(one, name), getattr(other, name)) for name in ("indptr", "indices", "weight", "perm"))
    return all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)


# ---- the store -----------------------------------------------------------------------------------------


def test_what_was_put_is_found_with_its_bits(store):
    assert store.get("a") is None
    put(store)
    found = store.get("a")
    assert all(torch.equal(found[name], array) and found[name].dtype == array.dtype for name, array in ARRAYS.items())
    [entry] = store.forms()
    assert (entry["graph"], entry["form"], entry["seconds"]) == ("demo", "self loops", 1.5)


@pytest.mark.parametrize("damage", ["flip", "truncate", "meta", "missing"])
def test_a_damaged_form_counts_as_absent_and_is_removed(store, damage):
    put(store)
    file, meta = store.folder / "a" / "indptr.npy", store.folder / "a" / "meta.json"
    data = file.read_bytes()
    if damage == "flip":
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "truncate":
        file.write_bytes(data[:-3])
    elif damage == "meta":
        meta.write_text("{")
    else:
        file.unlink()
    assert store.get("a") is None
    assert not (store.folder / "a").exists()
    put(store)
    assert store.get("a") is not None


def test_the_least_recently_used_go_beyond_the_limit(tmp_path):
    put(FormStore(tmp_path / "other"))
    size = FormStore(tmp_path / "other").entries()[0].bytes
    store = FormStore(tmp_path / "forms", limit=int(2.5 * size))
    for age, key in ((300, "a"), (200, "b")):
        put(store, key)
        for file in (store.folder / key).iterdir():
            os.utime(file, (1e9 - age, 1e9 - age))
    assert store.get("a") is not None  # and so it was used after b
    put(store, "c")
    assert sorted(path.name for path in store.folder.iterdir()) == ["a", "c"]


def test_more_than_the_limit_or_the_disk_has_is_not_written(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="more than the 4 B for all of them"):
        put(FormStore(tmp_path / "forms", limit=4))
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(100, 90, 10))
    with pytest.raises(OSError, match="10 B free"):
        put(FormStore(tmp_path / "forms"))
    assert list((tmp_path / "forms").iterdir()) == []


def test_what_a_dead_process_left_is_removed(store):
    draft = store.folder / ".draft-dead"
    draft.mkdir(parents=True)
    os.utime(draft, (1e9, 1e9))
    put(store)
    assert not draft.exists()


# ---- forms of a graph ----------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_remembered_forms_have_the_bits_of_made_ones(store, weighted, monkeypatch):
    all_worth(monkeypatch)
    torch.manual_seed(0)
    plain = made(weighted=weighted)
    expected = [plain.adj.gcn().transposed(), plain.adj.transposed(), plain.adj.with_self_loops()]
    for attempt in ("made", "found"):
        torch.manual_seed(0)
        graph = made(weighted=weighted)
        graph.adj.keep = FormKeeper(graph, store)
        if attempt == "found":
            graph.adj.rows = None  # not called: nothing is derived again
        found = [graph.adj.gcn().transposed(), graph.adj.transposed(), graph.adj.with_self_loops()]
        assert all(same(one, other) for one, other in zip(found, expected, strict=True))
    forms = {entry["form"] for entry in store.forms()}
    assert {"self loops", "self loops/by source", "self loops/transposed", "by source", "transposed"} == forms


def test_other_content_is_another_form(store, monkeypatch):
    all_worth(monkeypatch)
    one, other = made(), made()
    other.adj.indices[0] = (other.adj.indices[0] + 1) % 2  # in place: nothing but the values tells them apart
    one.adj.keep, other.adj.keep = FormKeeper(one, store), FormKeeper(other, store)
    assert not torch.equal(one.adj.with_self_loops().indices, other.adj.with_self_loops().indices)


def test_a_digest_knows_types_shapes_and_values():
    zeros = torch.zeros(4, dtype=torch.int32)
    kinds = [[zeros], [zeros.float()], [zeros.view(2, 2)], [zeros + 1], [zeros, None], [zeros.bfloat16()]]
    assert len({content_digest(kind) for kind in kinds}) == len(kinds)
    assert content_digest([zeros], 1) != content_digest([zeros], 2)
    strided = torch.arange(8)[::2]
    assert content_digest([strided]) == content_digest([strided.clone()])


def test_small_graphs_and_a_limit_of_zero_remember_nothing(monkeypatch):
    graph = made()
    with kept_forms(graph) as keeper:
        assert keeper is None
    all_worth(monkeypatch)
    monkeypatch.setenv(LIMIT_VARIABLE, "0")
    with kept_forms(graph) as keeper:
        assert keeper is None


def test_outside_of_a_run_nothing_is_remembered(store, monkeypatch):
    all_worth(monkeypatch)
    graph = made()
    with kept_forms(graph):
        looped = graph.adj.with_self_loops()
    assert graph.adj.keep is None
    looped.transposed()
    assert {entry["form"] for entry in store.forms()} == {"self loops"}


# ---- runs ----------------------------------------------------------------------------------------------


def train(model: str, graph: weft.Graph) -> weft.Result:
    task = weft.Task(graph=graph, model=model, hidden=8, epochs=3, dropout=0.5)
    return weft.run(task, device="cpu", progress=False)


@pytest.mark.parametrize("model", ["gcn", "sage", "gat"])
def test_a_second_run_reads_what_the_first_made_and_has_its_bits(model, monkeypatch):
    alone = train(model, made())
    all_worth(monkeypatch)
    first = train(model, made())
    entries = FormStore().forms()
    assert entries
    monkeypatch.setattr(FormStore, "put", None)  # nothing is made again
    second = train(model, made())
    for key in ("loss", "val_accuracy"):
        assert alone.history[key] == first.history[key] == second.history[key]


def test_a_disk_that_is_full_is_said_once_and_the_run_goes_on(monkeypatch):
    all_worth(monkeypatch)

    def full(*args, **options):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(sys.modules[FormStore.__module__], "write_array", full)
    notes = []
    result = weft.run(
        weft.Sweep(made(), model=["gcn", "sage"], hidden=8, epochs=2),
        device="cpu",
        progress=False,
        on_event=lambda event: notes.append(event.data["message"]) if event.kind == "note" else None,
    )
    assert {member.status for member in result} == {"finished"}
    assert [note for note in notes if "remembered" in note] == [
        "forms of graph 'citation' are not remembered: No space left on device"
    ]


# ---- the command ---------------------------------------------------------------------------------------


def test_the_command_lists_and_clears(store):
    put(store, form=f"first aggregation ('gcn', ()) {'0' * 64}")
    shown = CliRunner().invoke(app, ["cache"], catch_exceptions=False).stdout
    assert "demo: first aggregation gcn (1.5 s to make)" in shown
    assert "1 forms of graphs, 32 B of at most 16.0 GiB; 0 captured steps" in shown
    assert '"graph": "demo"' in CliRunner().invoke(app, ["cache", "--json"]).stdout
    assert "removed " in CliRunner().invoke(app, ["cache", "--clear"]).stdout
    assert store.forms() == []
    assert "0 forms" in CliRunner().invoke(app, ["cache"]).stdout


def test_a_limit_that_is_no_amount_is_one_sentence(monkeypatch):
    monkeypatch.setenv(LIMIT_VARIABLE, "much")
    with pytest.raises(weft.SpecError, match="WEFT_FORMS='much' is not an amount of memory"):
        FormStore()
