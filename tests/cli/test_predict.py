"""``weft predict``: files that other programs read back."""

from __future__ import annotations

import csv
from itertools import pairwise

from weft import Task, run

NAMES = ["plain", 'says "hi"', '"begins', "a,b", "two\nlines"]


def test_predictions_by_the_users_own_ids_are_a_csv_file_whatever_the_ids(tmp_path, weft):
    with (tmp_path / "nodes.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["id", "f", "label", "split"], *([name, 1, i % 2, "train"] for i, name in enumerate(NAMES))]
        )
    with (tmp_path / "edges.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["src", "dst"], *pairwise(NAMES)])
    run(Task(str(tmp_path), epochs=1), out=tmp_path / "run", device="cpu", progress=False)
    for what in ("classes", "logits"):
        out = tmp_path / f"{what}.csv"
        assert weft("predict", tmp_path / "run", "--out", out, "--what", what)[0] == 0
        with out.open(newline="") as file:
            rows = list(csv.reader(file))
        assert [row[0] for row in rows[1:]] == NAMES
        assert {len(row) for row in rows} == {2 if what == "classes" else 3}
