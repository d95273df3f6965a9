"""Write the generated parts of the documents from ``benchmarks/results/``, or check that they are up to date.

    python -m benchmarks.tables
    python -m benchmarks.tables --check

A generated part stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; :data:`PARTS` has the names.
"""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from difflib import unified_diff
from pathlib import Path

from benchmarks.harness.results import Results
from benchmarks.report import runs, training

ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    "README.md",
    "docs/plan.md",
    "docs/queue.md",
    "docs/division.md",
    "benchmarks/README.md",
    "benchmarks/MEASURED.md",
)


def kept(suite: str, make: Callable[[Results], str]) -> Callable[[], str]:
    """The part that ``make`` writes of the results that are kept of a suite."""
    return lambda: make(Results.of(suite))


PARTS: dict[str, Callable[[], str]] = {
    "brief": training.brief,
    "headline": training.headline,
    "headline-text": training.headline_text,
    "epoch": kept("epoch", training.epoch),
    "sweep": kept("sweep", training.sweep),
    "spmm": kept("spmm", training.spmm),
    "multi-kernels": kept("multi_kernels", training.multi_kernels),
    "samplers": kept("sampling", training.samplers),
    "sampling": kept("sampling", training.sampling),
    "different": kept("heterogeneous", runs.different),
    "whole-runs": kept("heterogeneous", runs.whole_runs),
    "never-slower": runs.never_slower,
    "first-minute": kept("first_minute", runs.first_minute),
    "sampled-epoch": kept("sampled_epoch", runs.sampled_epoch),
    "queues": kept("queues", runs.queues),
    "queue-use": kept("queues", runs.queue_use),
    "queue-goals": kept("queues", runs.queue_goals),
    "queue-epochs": kept("queue_epochs", runs.queue_epochs),
    "team-queue": kept("team_queue", runs.team_queue),
    "team-goals": kept("team_queue", runs.team_goals),
    "division": kept("division", runs.division),
    "division-goals": kept("division", runs.division_goals),
    "cpu": kept("cpu", runs.cpu),
    "files": runs.kept_files,
    "estimates": kept("estimates", runs.estimates),
    "estimate-takes": kept("estimates", runs.estimate_takes),
    "plan-estimates": kept("estimates", runs.plan_table),
    "accuracy": kept("accuracy", runs.accuracy),
}
MARKED = re.compile(r"<!-- table: ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)


class UnknownPart(Exception):
    """Raised for a marker whose name nothing is generated for."""


def generated(text: str, parts: dict[str, Callable[[], str]] = PARTS) -> str:
    """``text`` with every marked part written anew."""

    def written(found: re.Match[str]) -> str:
        name = found.group(1)
        if name not in parts:
            raise UnknownPart(f"nothing is generated for '<!-- table: {name} -->'; there are {', '.join(parts)}")
        return f"<!-- table: {name} -->\n\n{parts[name]().strip()}\n\n<!-- end -->"

    if text.count("<!-- table: ") != len(MARKED.findall(text)):
        raise UnknownPart("a '<!-- table: NAME -->' has no '<!-- end -->' behind it")
    return MARKED.sub(written, text)


def without_generated(text: str) -> str:
    """The parts of a document that are written by hand."""
    return MARKED.sub("", text)


def differences(name: str, root: Path = ROOT) -> str:
    """How a document differs from what the results say; empty if it does not."""
    old = (root / name).read_text(encoding="utf-8")
    lines = unified_diff(old.splitlines(), generated(old).splitlines(), name, f"{name} (generated)", lineterm="", n=0)
    return "\n".join(lines)


def main() -> None:
    """Write, or check."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a document differs")
    args = parser.parse_args()
    if args.check:
        found = "\n".join(filter(None, map(differences, DOCUMENTS)))
        if found:
            print(found)
            sys.exit("documents differ from benchmarks/results: run python -m benchmarks.tables")
        return
    for name in DOCUMENTS:
        path = ROOT / name
        old = path.read_text(encoding="utf-8")
        new = generated(old)
        if new != old:
            path.write_text(new, encoding="utf-8")
            print(f"{name}: written")


if __name__ == "__main__":
    main()
