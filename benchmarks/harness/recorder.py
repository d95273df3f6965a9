"""Recorder: runs the cells of a benchmark one after another, survives each of them, and keeps what they found.

A cell that fails is recorded with its error and the next one runs; cells that no longer fit the time budget
are recorded as skipped. So are the one under way and all later ones after Ctrl-C or SIGTERM, as of ``timeout``: the
suite then prints what it has. The results file is rewritten after every cell.

A results file also has hardware, versions, date, commit and command of its run.
"""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.results import Results

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
    }
    for name in PACKAGES:
        found[name] = None
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
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
    inside = next((parts[parts.index(name) :] for name in ("suites", "queue_runs") if name in parts), parts[-1:])
    module = ".".join(["benchmarks", *inside])
    words, shorten = [f"python -m {module}"], False
    for word in argv[1:]:
        words.append(Path(word).name if shorten else word)
        shorten = word in PATH_OPTIONS
    return " ".join(words)


class NotHere(Exception):
    """Raised by a cell that cannot be run on this machine; recorded as skipped, with the reason."""


def common_arguments(description: str) -> ArgumentParser:
    """The options every benchmark has."""
    parser = ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    parser.add_argument("--resume", action="store_true", help="keep the cells of --out that went well, run the others")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="begin no cell after this")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def listed(text: str) -> list[str]:
    """``"a,b"`` as a list."""
    return [word for word in text.split(",") if word]


class Recorder:
    """The cells of one run of one benchmark."""

    def __init__(self, name: str, args: Namespace) -> None:
        self.device = torch.device(args.device)
        torch.set_float32_matmul_precision("highest")
        self._name, self._out, self._budget = name, args.out, args.budget_seconds
        self._start = time.monotonic()
        self._lost: str | None = None
        self._ended: str | None = None
        self.about: dict[str, Any] = {"environment": environment(self.device)}
        self.cells: list[dict[str, Any]] = earlier_cells(args.out) if getattr(args, "resume", False) else []
        found = self.about["environment"]["commit"]
        self.say(f"commit {found}" if found else "the commit is not known: WEFT_COMMIT=... says it")

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self._budget - self.elapsed

    def need_gpu(self) -> None:
        """Have the cell skipped on a machine without a GPU."""
        if self.device.type != "cuda":
            raise NotHere("needs a GPU")

    def say(self, text: str) -> None:
        """A line of progress with the time."""
        print(f"[{self.elapsed:7.1f} s] {text}", flush=True)

    def prepare(self, label: str, make: Callable[[], Any]) -> Any:
        """What ``make()`` gives, timed and told; None, with the reason recorded, where that fails."""
        found: list[Any] = []
        start = self.elapsed
        outcome = self._attempt(lambda: found.append(make()) or {})
        self.say(
            f"{label}: {_brief(outcome, {}) if outcome['status'] != 'ok' else 'made'} in {self.elapsed - start:.1f} s"
        )
        self.about.setdefault("prepared", {})[label] = outcome
        self._free()
        return found[0] if found else None

    def cell(self, key: dict[str, Any], work: Callable[[], dict[str, Any]], *, free: bool = True) -> dict[str, Any]:
        """Run ``work`` and keep ``{**key, "status": ..., **result}``; never raises for what happens in it.

        A cell that an earlier run found (``--resume``) is not run again. ``free=False`` spares many small cells
        the second it takes to give their memory back.
        """
        label = " ".join(str(value) for value in key.values())
        earlier = find(self.cells, **key)
        if earlier is not None:
            self.say(f"{label}: done before")
            return earlier
        found = self._attempt(work)
        cell = {**key, **found}
        self.cells.append(cell)
        self.say(f"{label}: {_brief(cell, key)}")
        if free or cell["status"] == "failed":
            self._free()
        self.save()
        return cell

    def _attempt(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if self._lost:
            return {"status": "skipped", "reason": f"the device was lost: {self._lost}"}
        if self._ended:
            return {"status": "skipped", "reason": self._ended}
        if self.left <= 0:
            return {"status": "skipped", "reason": "the time budget was spent"}
        start = time.monotonic()
        try:
            with _ended_by_signals():
                found = {"status": "ok", **work()}
        except NotHere as reason:
            found = {"status": "skipped", "reason": str(reason)}
        except KeyboardInterrupt as ending:  # weft.run raises one of its own, for SIGTERM as well
            self._ended = "the benchmark was interrupted"
            found = {"status": "skipped", "reason": self._ended}
            ending.__traceback__ = ending.__context__ = ending.__cause__ = None
        except Exception as error:
            # The traceback would keep the frames, and with them the tensors, of the failed cell alive.
            found = {"status": "failed", "error": _describe(error)}
            error.__traceback__ = error.__context__ = error.__cause__ = None
        return {**found, "cell_seconds": round(time.monotonic() - start, 2)}

    def _free(self) -> None:
        gc.collect()
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        except RuntimeError as error:  # a fault in a kernel leaves the whole context unusable
            self._lost = _describe(error)

    def save(self, **more: Any) -> None:
        """Write everything found so far to ``--out``, in one piece."""
        self.about |= more
        if self._out is None:
            return
        data = {**self._data(), "seconds": round(self.elapsed, 1)}
        self._out.parent.mkdir(parents=True, exist_ok=True)
        partial = self._out.with_name(f".{self._out.name}.partial")
        partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self._out)

    def _data(self) -> dict[str, Any]:
        return {"benchmark": self._name, **self.about, "cells": self.cells}

    def print_tables(self, *tables: Callable[[Results], str]) -> None:
        """Save everything, then print tables as the documents have them, and why cells have no figure."""
        self.save()
        for table in tables:
            print(table(Results.from_dict(self._data())), end="\n\n")
        for cell in self.cells:
            if cell["status"] != "ok":
                key = itertools.takewhile(lambda pair: pair[0] != "status", cell.items())
                print(" ".join(str(value) for _, value in key), _brief(cell, {}), sep=": ")


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt, as Ctrl-C does; signals reach the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def earlier_cells(out: Path | None) -> list[dict[str, Any]]:
    """The cells in the results file ``out`` that went well; a run to go on with that is not there is a mistake."""
    if out is None or not out.exists():
        raise SystemExit(f"--resume: there is no run to go on with in {out}" if out else "--resume needs --out")
    data = json.loads(out.read_text(encoding="utf-8"))
    if "runs" in data:
        raise SystemExit(f"{out} holds several runs: write a new file and put it there with python -m benchmarks.merge")
    return [cell for cell in data["cells"] if cell["status"] == "ok"]


def _describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    kind = "out of memory" if isinstance(error, torch.OutOfMemoryError) else type(error).__name__
    return f"{kind}: {lines[0][:300]}"


def _brief(cell: dict[str, Any], key: dict[str, Any]) -> str:
    if cell["status"] != "ok":
        return f"{cell['status']} ({cell.get('error') or cell.get('reason')})"
    shown = {k: v for k, v in cell.items() if k not in key and isinstance(v, (int, float)) and k != "status"}
    return ", ".join(f"{k} {v:.4g}" for k, v in shown.items())


def find(cells: Iterable[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    """The last cell with these values that went well."""
    fitting = [c for c in cells if c["status"] == "ok" and all(c.get(k) == v for k, v in wanted.items())]
    return fitting[-1] if fitting else None
