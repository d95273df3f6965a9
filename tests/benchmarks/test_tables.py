"""Documents say what benchmarks/results says; figures outside of the generated parts are not allowed to appear."""

from __future__ import annotations

import re

import pytest

from benchmarks import tables
from benchmarks.harness.results import Results
from benchmarks.report import markdown, runs, training
from benchmarks.suites.sampled_epoch import ratios

FIGURE = re.compile(r"\d(?:\.\d+)?x\b|\d\s?(?:ms|TB/s|GB/s)\b")
# Parts of documents that have figures without a file, and say so.
WITHOUT_FILE = {"benchmarks/MEASURED.md": "## Studies that ended"}
# Hand-written parts in which every figure must be generated.
MEASURED = {"README.md": ("## Measured", "## Documents"), "benchmarks/MEASURED.md": ("# What was measured", None)}


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_documents_say_what_the_results_say(name):
    assert tables.differences(name) == "", "run python -m benchmarks.tables"


def test_every_part_stands_in_a_document():
    found = {part for name in tables.DOCUMENTS for part in tables.MARKED.findall((tables.ROOT / name).read_text())}
    assert found == set(tables.PARTS)


@pytest.mark.parametrize("name", MEASURED)
def test_figures_are_generated(name):
    begin, end = MEASURED[name]
    text = tables.without_generated((tables.ROOT / name).read_text())
    text = text[text.index(begin) : text.index(end) if end else None]
    text = text.partition(WITHOUT_FILE[name])[0] if name in WITHOUT_FILE else text
    found = [line for line in text.splitlines() if FIGURE.search(line)]
    assert not found, "a figure written by hand: generate it, or move it to the figures without a file"


def test_marked_parts_are_written_anew():
    parts = {"one": lambda: "new"}
    text = "a\n<!-- table: one -->\nold\n<!-- end -->\nb\n"
    once = tables.generated(text, parts)
    assert once == "a\n<!-- table: one -->\n\nnew\n\n<!-- end -->\nb\n"
    assert tables.generated(once, parts) == once
    assert tables.without_generated(once) == "a\n\nb\n"


@pytest.mark.parametrize("text", ["<!-- table: nothing -->\n<!-- end -->", "<!-- table: one -->\nno end"])
def test_a_mistaken_marker_is_an_error(text):
    with pytest.raises(tables.UnknownPart):
        tables.generated(text, {"one": lambda: ""})


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.79061, "0.791"), (17.2628, "17.3"), (816.8, "817"), (2028.1, "2,028"), (0.01, "0.0100"), (5.0, "5.00"),
     (0.00706, "0.00706"), (99.97, "100"), (0, "0"), (None, "-"), (0.000042, "0.000042")],
)  # fmt: skip
def test_numbers_have_three_digits(value, text):
    assert markdown.number(value) == text


def test_a_cell_shows_its_spread_or_why_there_is_none():
    timing = {"ms": 2.0, "low": 1.9, "high": 2.1, "repeats": 30}
    assert markdown.ms({"status": "ok", "ms": 2.0, "timing": timing}) == "2.00 ±5.0 %"
    assert markdown.ms({"status": "ok", "ms": 2.0}) == "2.00"
    assert markdown.ms({"status": "failed", "error": "out of memory: CUDA"}) == "out of memory"
    assert markdown.ms({"status": "failed", "error": "RuntimeError: capture"}) == "failed"
    assert markdown.ms({"status": "skipped", "reason": "no torch_sparse"}) == "not run"
    assert markdown.ms(None) == "-"


RUN = {"date": "2026-01-02T03:04:05", "device": "D", "torch": "2.0", "commit": "abc"}


def test_first_minutes_have_a_row_per_shape_and_model():
    here = {"shape": "cora", "model": "gcn", "status": "ok", "run": 0, "process_seconds": 9.0}
    cells = [{**here, "side": "cold", "seconds": 8.0, "first_epoch_seconds": 7.0},
             {**here, "side": "disk", "seconds": 4.0, "second_seconds": 0.5, "epochs_seconds": 0.05},
             {**here, "side": "pyg", "status": "failed", "error": "E: no"}]  # fmt: skip
    found = runs.first_minute(Results("first_minute", [RUN], cells))
    assert "| cora | GCN | 8.00 (7.00) | 4.00 (-) | 0.500 | 0.0500 | - | 9.00 / 9.00 / - | a |" in found
    assert "cora gcn pyg: E: no" in found
    assert "commit abc" in found


def test_sampled_epochs_have_what_was_predicted_beside_them():
    cell = {"shape": "products", "case": "host, pipelined", "tasks": 8, "precision": "fp32", "side": "weft", "run": 0,
            "status": "ok", "ms": 16.0, "ms_per_task": 2.0, "epoch_seconds": 3.1, "busy": 0.91, "peak_gb": 7.5,
            "predicted_seconds": 2.9}  # fmt: skip
    row = "| products | Weft | host, pipelined | 8 | fp32 | 16.0 | 3.10 | 2.90 | 91 % | - | 7.50 | - | a |"
    assert row in runs.sampled_epoch(Results("sampled_epoch", [RUN], [cell]))


def test_a_row_has_the_figures_of_one_run():
    here = {"shape": "cora", "model": "gcn", "status": "ok", "precision": "fp32", "tasks": 1}
    weft = {**here, "side": "weft", "ms": 1.0, "run": 1}
    cells = [weft, {**here, "side": "captured", "ms": 2.0, "run": 1}, {**here, "side": "pyg", "ms": 9.0, "run": 0},
             {**weft, "ms": 0.5, "tasks": 8}]  # fmt: skip
    results = Results("epoch", [RUN, {**RUN, "date": "2026-02-02"}], cells)
    assert "| cora | GCN | 1.00 | - | 2.00 | - | - | a |" in training.epoch(results)
    assert "| cora | GCN | 8 | fp32 | 0.500 | - | 4.00x | - | - | 4.00x | a |" in training.sweep(results)


@pytest.mark.parametrize("name", tables.DOCUMENTS)
def test_no_row_of_a_document_mixes_runs(name):
    text = (tables.ROOT / name).read_text()
    assert not re.search(r"\| [a-z] \+ [a-z]", text)


def test_tables_do_with_what_was_measured():
    """A run of some cells prints what it has: shapes that no document has, sides without a figure, or nothing."""
    makers = [training.epoch, training.sweep, training.spmm, training.multi_kernels, training.sampling]
    makers += [training.samplers]
    makers += [runs.different, runs.whole_runs, runs.first_minute, runs.sampled_epoch, runs.cpu, runs.accuracy]
    makers += [runs.queues, runs.queue_use, runs.queue_goals, runs.division, runs.division_goals, runs.estimates]
    for make in makers:
        assert "|" in make(Results("some", [RUN], [])), make
    here = {"shape": "tiny", "model": "gcn", "status": "ok", "precision": "fp32", "tasks": 2, "run": 0}
    results = Results(
        "epoch", [RUN], [{**here, "side": "weft", "ms": 1.0}, {**here, "side": "pyg", "status": "failed"}]
    )
    assert "| tiny | GCN | 1.00 | failed | - | - | - | a |" in training.epoch(results)
    assert "| tiny | GCN | 2 | fp32 | 1.00 |" in training.sweep(results)


def test_sampled_epochs_are_compared_within_one_run():
    about = {"shape": "products", "tasks": 1, "precision": "fp32", "status": "ok"}
    serial, ahead = {**about, "case": "host, serial"}, {**about, "case": "host, pipelined"}
    one = [{**serial, "epoch_seconds": 3.0, "run": 0}, {**ahead, "epoch_seconds": 2.0, "run": 0}]
    assert list(ratios(one)) == [("serial over pipelined", 1.5)]
    assert list(ratios([one[0], {**one[1], "run": 1}])) == []
    assert list(ratios([one[0], {**one[1], "status": "failed"}])) == []
