"""The table of docs/architecture.md is the one of the recorded outcomes, which have every cell."""

from __future__ import annotations

import pytest

from tests.matrix.cells import CELLS, KINDS, PLACES, SAME, recorded, some_cells
from tests.matrix.table import DOCUMENT, RECORD, text_of, written


def test_the_document_has_the_table_of_the_record():
    document = DOCUMENT.read_text(encoding="utf-8")
    assert written(document, recorded(RECORD)) == document, "run python -m tests.matrix.table"


def test_every_cell_is_on_record_and_every_refusal_is_one_sentence():
    outcomes = recorded(RECORD)
    assert list(outcomes) == [str(cell) for cell in CELLS]
    for cell, outcome in outcomes.items():
        assert outcome == SAME or (len(outcome) > 20 and "\n" not in outcome and "Traceback" not in outcome), cell


def test_what_is_tried_often_has_every_kind_in_every_place():
    chosen = some_cells()
    assert len({(cell.kind, cell.place) for cell in chosen}) == len(chosen) == len(KINDS) * len(PLACES)
    assert {(cell.mode, cell.killed, cell.place) for cell in chosen} >= {
        (mode, killed, "queue") for mode in ("full", "sampled") for killed in (False, True)
    }


def test_a_refusal_stands_below_the_table_once():
    outcomes = {str(cell): SAME if cell.place == "run" else "shards have no relations" for cell in CELLS}
    text = text_of(outcomes)
    assert text.count("shards have no relations") == 1
    assert "| solo, full | runs | refused (1) |" in text
    del outcomes[str(CELLS[0])]
    assert "| solo, full | not tried; killed: runs |" in text_of(outcomes)


@pytest.mark.parametrize("place", PLACES)
def test_a_place_is_tried_killed_and_not(place):
    assert {cell.killed for cell in some_cells() if cell.place == place} == {False, True}
