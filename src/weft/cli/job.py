"""``weft job``: a batch script of Slurm or a Job of Kubernetes for a spec, with what it is predicted to take."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from weft.cli.format import check_file, write_file
from weft.cli.options import Changes
from weft.cli.spec import spec_of
from weft.core.errors import DoesNotFitError, SpecError

SETUP_SECONDS = 600  # for what a plan does not predict: starting, reading the graph, compiling; assumed
CUDA_HOST_BYTES = 4 << 30  # of a process with CUDA's libraries on its host; assumed


def job(
    kind: Annotated[str, typer.Argument(metavar="slurm|k8s", help="What to write it for.")],
    spec: Annotated[Path, typer.Argument(help="TOML file that describes a task or a sweep.", metavar="SPEC.toml")],
    machine: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Where it will run, as of `weft plan`.", show_default="the one at hand"),
    ] = None,
    margin: Annotated[float, typer.Option(help="Predicted seconds and host memory times this are requested.")] = 2.0,
    image: Annotated[str, typer.Option(help="k8s: the container image, which has Weft and SPEC.")] = "weft:latest",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write it.", show_default="standard output")
    ] = None,
    changes: Changes = None,
) -> None:
    """Print a batch script (slurm) or a Job manifest (k8s; JSON, which is YAML) that runs SPEC.

    Memory and time limit are those that `weft plan` predicts. The run writes to runs/NAME and goes on from its
    checkpoint if it is started again. Exit code 4: it does not fit.
    """
    if kind not in ("slurm", "k8s"):
        raise SpecError(f"{kind}: must be slurm or k8s")
    if not 1 <= margin < math.inf:
        raise SpecError(f"--margin {margin:g}: must be at least 1")
    if out is not None:
        check_file(out)
    work = spec_of(spec, changes or [])
    from weft.engine.estimate import host_bytes
    from weft.engine.plan import plan
    from weft.planner.report.plan_text import refusal

    report = plan(work, machine)
    if not report.fits:
        raise DoesNotFitError(refusal(report))
    name = re.sub(r"[^a-z0-9]+", "-", f"weft-{work.label}".lower())[:63].strip("-")
    command = ["weft", "run", str(spec), "--out", f"runs/{name}", "--resume"]
    command += [word for change in changes or [] for word in ("--set", change)]
    on_gpu, host = report.machine.device == "cuda", host_bytes(report)
    seconds = report.run_seconds + report.compile_seconds
    facts = {"weft/host-memory-bytes": str(host), "weft/seconds": f"{seconds:.3g}"}  # predictions, as annotations
    facts |= {"weft/gpu-memory-bytes": str(report.peak_bytes)} if on_gpu else {}
    mebibytes = math.ceil((margin * host + on_gpu * CUDA_HOST_BYTES) / (1 << 20))
    minutes, cores = math.ceil((margin * seconds + SETUP_SECONDS) / 60), max(report.machine.host.cores, 1)
    if kind == "slurm":
        lines = [
            "#!/bin/bash",
            *(f"# predicted {key}: {value}" for key, value in facts.items()),
            f"#SBATCH --job-name={name}",
            *(["#SBATCH --gres=gpu:1"] if on_gpu else []),
            f"#SBATCH --cpus-per-task={cores}",
            f"#SBATCH --mem={mebibytes}M",
            f"#SBATCH --time={minutes // 60}:{minutes % 60:02}:00",
            "#SBATCH --requeue",
            "set -eu",
            shlex.join(command),
        ]
        text = "\n".join(lines)
    else:
        limits = {"cpu": cores, "memory": f"{mebibytes}Mi", **({"nvidia.com/gpu": 1} if on_gpu else {})}
        container = {"name": "weft", "image": image, "command": command, "resources": {"limits": limits}}
        pod = {"metadata": {"annotations": facts}, "spec": {"restartPolicy": "Never", "containers": [container]}}
        runs = {"backoffLimit": 3, "activeDeadlineSeconds": 60 * minutes, "template": pod}
        about = {"name": name, "annotations": facts}
        text = json.dumps({"apiVersion": "batch/v1", "kind": "Job", "metadata": about, "spec": runs}, indent=2)
    if out is None:
        print(text)
    else:
        write_file(out, f"{text}\n")
