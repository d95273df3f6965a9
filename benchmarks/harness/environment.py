"""What one has to know to reproduce a number: hardware, versions, date and command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("triton", "torch_geometric", "torch_sparse", "numpy", "numba", "scipy")
PATH_OPTIONS = ("--out", "--data")
ROOT = Path(__file__).resolve().parents[2]


def environment(device: torch.device) -> dict[str, Any]:
    """Hardware, versions and date, as plain data."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command(sys.argv),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        **{name: version(name) for name in PACKAGES},
    }
    return found | (gpu(device) if device.type == "cuda" else cpu())


def commit() -> str | None:
    """``$WEFT_COMMIT`` if set, else the commit of this checkout, ``+`` behind it if files differ; None if unknown.

    A copy without a ``.git`` of its own is none, even if it lies inside another checkout: say what it is a copy of.
    """
    if os.environ.get("WEFT_COMMIT"):
        return os.environ["WEFT_COMMIT"]
    questions = (
        ["rev-parse", "--show-toplevel"], ["rev-parse", "--short", "HEAD"],
        ["status", "--porcelain", "--untracked-files=no"],
    )  # fmt: skip
    try:
        top, found, changed = (
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True).stdout
            for words in questions
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if Path(top.strip()).resolve() != ROOT:
        return None
    return found.strip() + ("+" if changed.strip() else "")


def version(package: str) -> str | None:
    """The installed version, None where the package is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu(device: torch.device) -> dict[str, Any]:
    """The GPU in numbers."""
    about = torch.cuda.get_device_properties(device)
    return {
        "device": about.name,
        "multiprocessors": about.multi_processor_count,
        "memory_gb": round(about.total_memory / 1e9, 1),
        "l2_mb": round(about.L2_cache_size / 1e6, 1),
        "cuda": torch.version.cuda,
    }


def cpu() -> dict[str, Any]:
    """The processor: its name where the system tells it, its cores, and the threads torch uses of them."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].partition(":")[2].strip() if lines else name
    return {"device": name, "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def command(argv: list[str]) -> str:
    """The command line as a reader of the results would type it: folders of this machine are left out."""
    parts = Path(argv[0]).with_suffix("").parts
    inside = parts[parts.index("suites") :] if "suites" in parts else parts[-1:]
    module = ".".join(["benchmarks", *inside])
    words, shorten = [f"python -m {module}"], False
    for word in argv[1:]:
        words.append(Path(word).name if shorten else word)
        shorten = word in PATH_OPTIONS
    return " ".join(words)
