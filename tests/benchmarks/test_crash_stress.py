"""The trainings that are to crash workers, and how a crash is found."""

from __future__ import annotations

import itertools

from benchmarks.queue_runs.crash_stress import CRASHED, logs, trainings
from weft.core.task import Task


def test_trainings_are_short_and_the_same_for_one_seed(tmp_path):
    found = list(itertools.islice(trainings([tmp_path / "a", tmp_path / "b"], 3, epochs=4), 60))
    assert found == list(itertools.islice(trainings([tmp_path / "a", tmp_path / "b"], 3, epochs=4), 60))
    assert {one["model"] for one in found} == {"gin", "gcn", "sage", "gat"}
    assert {one["epochs"] for one in found} == {1, 2, 3, 4}
    assert all(Task.from_dict(one).traits is not None for one in found)


def test_the_logs_of_crashes_are_found_from_the_crash_on(tmp_path):
    for name, text in {"a": "all is well", "b": "printed\nFatal Python error: Segmentation fault\nThread 1"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.txt").write_text(text)
    assert logs(tmp_path, CRASHED) == {"b/log.txt": "Fatal Python error: Segmentation fault\nThread 1"}
