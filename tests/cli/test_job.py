"""``weft job``: scripts that a scheduler reads, with what the plan predicts in them."""

from __future__ import annotations

import re
import shlex

import pytest

from weft import Task, plan

SPEC = 'graph = "shape:ogbn-arxiv"\nname = "my task"\n[model]\nname = "gcn"\nlayers = 3\n[train]\nepochs = 500\n'


@pytest.fixture
def spec(tmp_path):
    file = tmp_path / "spec.toml"
    file.write_text(SPEC)
    return file


@pytest.fixture
def predicted():
    return plan(Task("shape:ogbn-arxiv", layers=3, epochs=500, name="my task"), machine="h200")


def test_a_batch_script_of_slurm(spec, weft, predicted):
    code, out, _ = weft("job", "slurm", spec, "--machine", "h200", "--set", "train.epochs=500")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "#!/bin/bash"
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH"))
    assert options["job-name"] == "weft-my-task"
    assert options["gres"] == "gpu:1"
    assert re.fullmatch(r"\d+M", options["mem"])
    hours, minutes, seconds = map(int, options["time"].split(":"))
    assert 3600 * hours + 60 * minutes + seconds >= 2 * predicted.run_seconds
    assert f"# predicted weft/gpu-memory-bytes: {predicted.peak_bytes}" in lines
    words = shlex.split(lines[-1])
    assert words == [
        *("weft", "run", str(spec), "--out", "runs/weft-my-task", "--resume", "--set", "train.epochs=500"),
    ]


def test_a_job_of_kubernetes(spec, weft, predicted, tmp_path):
    yaml = pytest.importorskip("yaml")
    file = tmp_path / "job.yaml"
    options = ("--machine", "h200", "--image", "registry/weft:1", "--margin", "3", "--out", file)
    assert weft("job", "k8s", spec, *options)[0] == 0
    job = yaml.safe_load(file.read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert job["metadata"]["annotations"]["weft/gpu-memory-bytes"] == str(predicted.peak_bytes)
    assert job["spec"]["activeDeadlineSeconds"] >= 3 * predicted.run_seconds
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry/weft:1"
    assert container["command"][:3] == ["weft", "run", str(spec)]
    limits = container["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == 1
    host = int(job["metadata"]["annotations"]["weft/host-memory-bytes"])
    assert int(limits["memory"].removesuffix("Mi")) << 20 >= 3 * host


def test_a_job_on_a_cpu_requests_no_gpu(spec, weft):
    code, out, _ = weft("job", "slurm", spec, "--machine", "cpu")
    assert code == 0
    assert "gres" not in out
    assert "gpu" not in out


def test_mistakes(spec, weft):
    wide = ("--machine", "t4", "--set", "model.hidden=8192")
    for words, code, told in [
        (("pbs", spec), 2, "pbs: must be slurm or k8s"),
        (("slurm", spec, "--margin", "0.5"), 2, "--margin 0.5: must be at least 1"),
        (("slurm", spec, *wide), 4, "does not fit"),
    ]:
        found, out, err = weft("job", *words)
        assert (found, out) == (code, "")
        assert told in err
