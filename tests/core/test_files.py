"""Files are written in one piece, and changed by one process at a time."""

from __future__ import annotations

import json
import math
import multiprocessing

import pytest

from weft.core.files import locked, replacing, write_json, write_text


def test_text_bytes_and_json(tmp_path):
    write_text(tmp_path / "a.txt", "ä\n")
    with replacing(tmp_path / "b", flush=True) as partial:
        partial.write_bytes(b"\0\1")
    write_json(tmp_path / "c.json", {"loss": math.nan, "rows": (1, math.inf)}, indent=1)
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "ä\n"
    assert (tmp_path / "b").read_bytes() == b"\0\1"
    assert json.loads((tmp_path / "c.json").read_text()) == {"loss": None, "rows": [1, None]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b", "c.json"]


def test_a_failed_write_leaves_the_former_file_and_nothing_else(tmp_path):
    write_text(tmp_path / "a.txt", "old")

    def torn():
        with replacing(tmp_path / "a.txt") as partial:
            partial.write_text("ha")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        torn()
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def _count(path, times):
    for _ in range(times):
        with locked(path):
            write_text(path, str(int(path.read_text()) + 1))


def test_changes_of_several_processes_are_all_kept(tmp_path):
    path = tmp_path / "table"
    path.write_text("0")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_count, args=(path, 50)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert path.read_text() == "150"


def test_what_cannot_be_locked_is_still_written(tmp_path):
    (tmp_path / "file").write_text("")
    written = False
    with locked(tmp_path / "file" / "below"):  # there is no such folder, and none can be made
        written = True
    assert written
