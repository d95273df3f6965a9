"""Options of a server that cannot be used: one sentence, before a file is made or anything starts."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from weft.cli.app import app as cli
from weft.core import gpus
from weft.core.errors import SpecError
from weft.serve.options import ServeOptions
from weft.serve.server import check_devices, serve
from weft.serve.submissions import Tokens

NAN, INF = math.nan, math.inf
BAD_NUMBERS = [
    *(("keep_seconds", value) for value in (-1.0, 0.0, NAN, INF, 1e12)),
    *(("hang_seconds", value) for value in (0, -1, NAN, INF, True)),
    *(("checkpoint_seconds", value) for value in (-1, NAN, INF)),
    *(("lease_seconds", value) for value in (0, NAN)),
    *(("silent_seconds", value) for value in (0, NAN)),
    *(("workers", value) for value in (0, -1, NAN, 1.5, True)),
    *(("inference_workers", value) for value in (-1, 1, NAN)),
    *(("quota", value) for value in (0, -1, NAN)),
    *(("budget", value) for value in (0, -1, NAN)),
    *(("reserved", value) for value in (-1, NAN)),
    *(("keep_graphs", value) for value in (-1, NAN)),
    *(("overrun_bytes", value) for value in (-1, NAN)),
]


@pytest.mark.parametrize(("name", "value"), BAD_NUMBERS)
def test_bad_numbers(tmp_path, name, value):
    with pytest.raises(SpecError, match=f"{name}={value} must be"):
        ServeOptions(tmp_path / "q.db", **{name: value})


def test_numbers_at_their_limits(tmp_path):
    made = ServeOptions(tmp_path / "q.db", checkpoint_seconds=0, hang_seconds=0.1, keep_seconds=1e-3, keep_graphs=0)
    assert made.checkpoint_seconds == 0


BAD_WORDS = {
    "--keep-days=-1": "keep_days=-1.0 must be a finite number of days, above 0",
    "--keep-days=0": "keep_days=0.0 must be",
    "--keep-days=nan": "keep_days=nan must be",
    "--keep-days=1e308": "keep_days=1e+308 must be at most 46,296 days",
    "--hang-seconds=0": "hang_seconds=0.0 must be",
    "--hang-seconds=nan": "hang_seconds=nan must be",
    "--checkpoint-seconds=-1": "checkpoint_seconds=-1.0 must be a finite number of seconds, 0 or more",
    "--checkpoint-seconds=nan": "checkpoint_seconds=nan must be",
    "--drain-seconds=nan": "drain_seconds=nan must be",
    "--drain-seconds=-1": "drain_seconds=-1.0 must be",
    "--drain-seconds=1e300": "drain_seconds=1e+300 must be at most",
    "--quota=0": "quota=0 must be at least 1 task per user",
    "--budget=0": "budget='0' must be at least one byte",
    "--keep-graphs=nan": "keep_graphs='nan' is not an amount of memory",
    "--bind=127.0.0.1:65536": "expected HOST:PORT",
    "--bind=127.0.0.1:\u00b2": "expected HOST:PORT",
    "--devices=nonsense": "device 'nonsense' must be auto, cpu, cuda or cuda:N",
    "--devices=cuda:\u00b2": "must be auto, cpu, cuda or cuda:N",
    "--devices=cuda:99": "device 'cuda:99' is not there; this machine has cpu",
    "--graphs=/nope/graphs": "graphs='/nope/graphs' is not a folder",
    "--allow-model=foo": "allow_model='foo' must be MODULE:CALLABLE",
    "--allow-model=foo:": "allow_model='foo:' must be MODULE:CALLABLE",
    "--allow-model=:Net": "allow_model=':Net' must be MODULE:CALLABLE",
}


@pytest.mark.parametrize("word", BAD_WORDS)
def test_one_sentence_before_a_file_is_made(tmp_path, word):
    answer = CliRunner().invoke(cli, ["serve", "--db", str(tmp_path / "made" / "q.db"), word])
    assert isinstance(answer.exception, SpecError), answer.output
    assert BAD_WORDS[word] in str(answer.exception)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("devices", "count", "missing"), [
    (("cuda:0",), 0, "cuda:0"),
    (("cuda",), 0, "cuda:0"),
    (("cuda:0", "cuda:2"), 2, "cuda:2"),
    (("cuda:1",), 2, None),
    (("cpu",), 0, None),
    (("auto",), 0, None),
    (("cuda:7@node",), 0, None),
])  # fmt: skip
def test_devices_that_are_not_there(tmp_path, monkeypatch, devices, count, missing):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    options = ServeOptions(tmp_path / "q.db", devices=devices)
    if missing is None:
        check_devices(options)
        return
    for start in (lambda: check_devices(options), lambda: serve(options, "127.0.0.1", 0, Tokens(open=True))):
        with pytest.raises(SpecError, match=f"device '{missing}' is not there"):
            start()
    assert not options.db.exists()


@pytest.mark.parametrize(("chosen", "names"), [
    (None, ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
    ("3", ("cuda:0",)),
    ("2,0", ("cuda:0", "cuda:1")),
    ("GPU-2", ("cuda:0",)),
    ("", ("cpu",)),
    ("9", ("cpu",)),
])  # fmt: skip
def test_auto_takes_the_gpus_that_cuda_shows(tmp_path, monkeypatch, chosen, names):
    monkeypatch.setattr(gpus, "_in_files", lambda: [gpus.Gpu("NVIDIA H200", f"GPU-{place}") for place in range(4)])
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    if chosen is not None:
        monkeypatch.setenv(gpus.VISIBLE, chosen)
    assert ServeOptions(tmp_path / "q.db").device_names() == names


def test_a_drain_from_python_that_is_no_number(tmp_path):
    with pytest.raises(SpecError, match="drain_seconds=nan"):
        serve(ServeOptions(tmp_path / "q.db", devices=("cpu",)), "127.0.0.1", 0, Tokens(open=True), NAN)


def test_the_server_of_a_cpu_imports_no_torch():
    code = (
        "import sys, pathlib; from weft.serve.options import ServeOptions; from weft.serve.server import check_devices;"
        "check_devices(ServeOptions(pathlib.Path('q.db'), devices=('cpu',)));"
        "sys.exit('torch' in sys.modules or 'fastapi' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, env={"PYTHONPATH": "src"}).returncode == 0
