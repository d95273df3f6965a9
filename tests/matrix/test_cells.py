"""Thirty cells of the matrix, each tried anew: its outcome is the one on record. ``make soak`` tries all of them."""

from __future__ import annotations

import pytest

from tests.matrix.cells import PLACES, Fault, Matrix, recorded, some_cells
from tests.matrix.table import RECORD

pytestmark = [pytest.mark.rest, pytest.mark.long, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("place", PLACES)
def test_work_has_the_numbers_of_the_plain_run_or_is_refused_as_on_record(place, tmp_path):
    pytest.importorskip("torch_geometric")
    if place == "Ray":
        pytest.importorskip("ray")
    found, expected = {}, recorded(RECORD)
    with Matrix(tmp_path) as matrix:
        for cell in (cell for cell in some_cells() if cell.place == place):
            try:
                found[str(cell)] = matrix.outcome(cell)
            except Fault as fault:
                found[str(cell)] = f"FAULT: {fault}"
    assert found == {cell: expected[cell] for cell in found}
