"""A server takes one split per task: it never opens a graph, so it cannot know how many there are."""

from __future__ import annotations

import subprocess
import sys

import pytest

from weft.serve.submissions import BadRequestError, Registry, read_submissions


def submitted(**settings):
    (submission,) = read_submissions({"task": {"graph": "demo", **settings}}, Registry(), "me", str)
    return submission.spec["task"]


def test_all_splits_at_once_are_refused_and_one_is_not():
    assert submitted(split=3)["split"] == 3
    with pytest.raises(BadRequestError, match="send a task per split"):
        submitted(split="all")


def test_checking_a_submission_needs_no_torch():
    code = "import sys, weft.serve.submissions; sys.exit('torch' in sys.modules)"
    env = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], timeout=60, env=env).returncode == 0
