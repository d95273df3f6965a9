"""Mistakes and mishaps of sampled training in the shell: one sentence and an exit code, no traceback."""

from __future__ import annotations

import resource
import subprocess
import sys

import numpy as np
import pytest

from tests.cli.test_run import spec  # noqa: F401
from weft.batches import FeatureStore

SPEC = """
graph = "tiny"
[model]
name = "sage"
hidden = 8
[train]
epochs = 3
mode = "sampled"
"""


def refused(answer, code: int, words: str) -> None:
    assert answer[0] == code, answer
    sentence = answer[2].strip()
    assert words in sentence
    assert sentence.startswith("weft: error:")
    assert len(sentence.splitlines()) == 1


@pytest.mark.parametrize(("line", "words"), [
    ("fanout = [5, 3, 2]", "fanout=[5, 3, 2] has 3 hops for layers=2; give one number per layer"),
    ("fanout = [5]", "has 1 hops for layers=2"),
    ("fanout = []", "fanout=[] has no values"),
    ("fanout = [5, 0]", "must list neighbours per hop"),
    ("fanout = [5, 2.5]", "must list neighbours per hop"),
    ("fanout = 5", "must list neighbours per hop"),
    ("batch = 0", "batch=0 must be at least 1"),
    ("batch = -3", "batch=-3 must be at least 1"),
    ("batch_seed = -1", "batch_seed=-1 must be at least 0"),
])  # fmt: skip
def test_settings(weft, spec, line, words):  # noqa: F811
    spec.write_text(SPEC + line + "\n")
    refused(weft("run", spec, "--device", "cpu"), 2, words)


def test_a_training_node_out_of_range(weft, spec):  # noqa: F811
    np.savez("far.npz", num_nodes=4, src=[0, 1, 2], dst=[1, 2, 3], y=[0, 1, 0, 1], x=np.eye(4), train=[0, 9])
    spec.write_text(SPEC.replace('"tiny"', '"far.npz"'))
    refused(weft("run", spec, "--device", "cpu"), 2, "9")


def test_a_stage_that_raises(weft, spec, monkeypatch):  # noqa: F811
    def broken(store, ids):
        raise OSError("the disk was taken away")

    monkeypatch.setattr(FeatureStore, "read", broken)
    spec.write_text(SPEC)
    refused(
        weft("run", spec, "--device", "cpu", "--json"),
        3,
        "stage 'fetch' failed at item 0: OSError: the disk was taken away",
    )


def test_a_disk_without_room(spec):  # noqa: F811
    """Every file of the process ends at 2 KB, so no checkpoint can be written."""
    spec.write_text(SPEC + "batch = 8\n")

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))

    command = [sys.executable, "-m", "weft", "run", str(spec), "--device", "cpu", "--out", "full"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, timeout=300)
    assert done.returncode == 3, done.stderr
    assert "cannot write" in done.stderr
    assert "Traceback" not in done.stderr
    *progress, last = done.stderr.strip().splitlines()
    assert last.startswith("weft: error: cannot write to full")
    assert not any(line.startswith("weft: error") for line in progress)
