"""Check, explain and measure the persistent step on a GPU, within a budget of seconds.

    python -m benchmarks.suites.persistent --budget-seconds 100

First, all at once, since a kernel takes some 18 s to compile and a machine has many cores: the tests for a GPU, and the
kernels of every cell, each compared with the stack's own step in a process of its own. Where one fails, its phases run
one by one. Then the table, one process at a time. Sides of a cell: launch by launch in a CUDA graph, and one kernel of
so many programs and warps; the update is included, evaluation is not.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch

from benchmarks.harness.environment import environment
from benchmarks.harness.recorder import common_arguments, listed, print_table

# programs, warps, stages, registers; None: what the kernels' own launches decide
VARIANTS = (
    (512, 4, 1, 128), (256, 4, 1, 128), (128, 4, None, None), (256, 4, None, None), (512, 2, 1, None),
    (128, 8, 1, None),
)  # fmt: skip
TIMED = (512, 4, 1, 128)  # the variant whose phases are timed
Key = tuple[str, str]
Variant = tuple[int, int, int | None, int | None]
COLUMNS = ("shape", "model", "side", "ms", "empty_phase_us", "phases", "launches", "first_call_s", "worst_loss")
TESTS = ["-m", "pytest", "tests/gpu/test_persistent_gpu.py", "-q", "-p", "no:cacheprovider", "-n", "6", "--timeout=80"]
OUT_OF_TIME = "out of time"
FOR_MEASURING = 0.4  # of the budget


class Child:
    """A process with processes of its own, which are ended after their time."""

    def __init__(self, label: str, command: list[str]) -> None:
        self.label, self._start = label, time.monotonic()
        self._said = TemporaryFile("w+")  # noqa: SIM115  open as long as the process
        self._process = subprocess.Popen(
            [sys.executable, *command], stdout=self._said, stderr=subprocess.STDOUT, start_new_session=True
        )

    def finish(self, seconds: float) -> tuple[Any, str]:
        """Its outcome (None if it failed) and the end of what it printed."""
        try:
            ok = self._process.wait(timeout=max(0.5, seconds)) == 0
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            ok = False
            self._said.write(f"\n{OUT_OF_TIME}\n")
        self._said.seek(0)
        lines = self._said.read().strip().split("\n")
        print(f"[{time.monotonic() - self._start:5.1f} s] {self.label}: {'done' if ok else 'FAILED'}", flush=True)
        text = "\n".join(lines[-12:])
        print("" if ok else f"{text}\n", end="", flush=True)
        return (_outcome(lines) if ok else None), text


def _outcome(lines: list[str]) -> Any:
    """What the last line that is JSON says; True without any."""
    for line in reversed(lines):
        if line.startswith(("[", "{", '"')):
            with suppress(ValueError):
                return json.loads(line)
    return True


def cell(kind: str, shape: str, model: str, variants: Any) -> Child:
    """A child for one cell."""
    command = ["-m", "benchmarks.suites.persistent.child", kind, shape, model, json.dumps(variants)]
    return Child(f"{kind} {shape} {model} {variants}", command)


def main() -> None:
    """Run everything and print the tables last."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="cora,pubmed")
    parser.add_argument("--models", default="gcn")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this suite needs a GPU")
    budget = min(args.budget_seconds, 600.0)
    found = {"environment": environment(torch.device("cuda"))}
    keys = [(shape, model) for model in listed(args.models) for shape in listed(args.shapes)]
    found |= run(keys, time.monotonic() + (1 - FOR_MEASURING) * budget, time.monotonic() + budget)
    out = args.out or (Path(os.environ["OUT"]) / "persistent.json" if "OUT" in os.environ else None)
    if out is not None:
        out.write_text(json.dumps(found, indent=1))
    show(found)


def run(keys: list[Key], prepared: float, end: float) -> dict[str, Any]:
    """Start everything that compiles, then measure what was compiled and found right."""
    checks = {key: {code: cell("check", *key, [v]) for code, v in by_code().items()} for key in keys}
    timed, tests = cell("phases", *keys[0], [TIMED]), Child("tests", TESTS)
    rows: list[dict[str, Any]] = []
    told: list[str] = []
    said, phases = "", None
    for key in keys:
        right = checked(key, checks[key], prepared, told)
        if key == keys[0]:
            timed.finish(prepared - time.monotonic())
            said = tests.finish(prepared - time.monotonic())[1].split("\n")[-1]
        rows += measured(key, [variant for variant in VARIANTS if variant[1:] in right], end)
        if key == keys[0]:
            phases, _ = cell("phases", *key, [TIMED]).finish(end - time.monotonic())
    return {"rows": rows, "phases": phases or [], "tests": said, "faults": told}


def by_code() -> dict[Any, Variant]:
    """One variant of those that differ in programs alone: they are the same code."""
    return {variant[1:]: variant for variant in reversed(VARIANTS)}


def checked(key: Key, checks: dict[Any, Child], end: float, told: list[str]) -> set[Any]:
    """The codes whose kernels are on disk and right; what a fault is goes to ``told``, for the first one."""
    outcomes = {code: child.finish(end - time.monotonic()) for code, child in checks.items()}
    failed = [code for code, (outcome, text) in outcomes.items() if outcome is None and OUT_OF_TIME not in text]
    for code in failed[:1] if not told else ():
        told.append(cell("fault", *key, [by_code()[code]]).finish(end + 15 - time.monotonic())[1])
        print(told[-1], flush=True)
    return {code for code, (outcome, _) in outcomes.items() if outcome is not None}


def measured(key: Key, variants: list[Variant], end: float) -> list[dict[str, Any]]:
    """The rows of one shape and model."""
    outcome, text = cell("measure", *key, variants).finish(end - time.monotonic())
    failed = [{"side": text.split("\n")[-1][:80]}]
    return [{"shape": key[0], "model": key[1], **row} for row in outcome or failed]


def show(found: dict[str, Any]) -> None:
    """The phases, what the tests said, and the table."""
    for one in found["phases"]:
        print(f"{one['work_us']:7.2f} us work {one['wait_us']:7.2f} us wait  {one['kernels']}")
    print(f"tests: {found['tests']}")
    print_table(COLUMNS, [[str(row.get(name, "")) for name in COLUMNS] for row in found["rows"]])
    for row in found["rows"]:
        if "error" in row:
            print(f"{row['shape']} {row['model']} {row['side']}: {row['error']}")


if __name__ == "__main__":
    main()
