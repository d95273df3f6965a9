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

from benchmarks.report import kernels, modules, planning, runs, sampled, sharing, training

ROOT = Path(__file__).parents[1]
DOCUMENTS = (
    "README.md",
    "docs/measured.md",
    "docs/plan.md",
    "docs/queue.md",
    "docs/division.md",
    "benchmarks/README.md",
)
PARTS: dict[str, Callable[[], str]] = {
    "headline": training.headline,
    "headline-text": training.headline_text,
    "epoch": training.epoch,
    "epoch-ratios": training.epoch_ratios,
    "epoch-memory": training.epoch_memory,
    "baselines-vary": training.baselines_vary,
    "sweep": training.sweep,
    "sweep-sizes": training.sweep_sizes,
    "pyg-precisions": training.pyg_precisions,
    "stacking": training.arxiv_stack_sentence,
    "spmm": kernels.spmm,
    "clusters": kernels.clusters,
    "attention": kernels.attention,
    "multi-kernels": kernels.multi_kernels,
    "directions": kernels.directions,
    "sampling": kernels.sampling,
    "different": runs.different,
    "whole-runs": runs.whole_runs,
    "weaving": runs.weaving,
    "compiled": runs.compiled,
    "converted": modules.converted,
    "never-slower": modules.never_slower,
    "relations": modules.relations,
    "first-minute": runs.first_minute,
    "sampled-epoch": runs.sampled_epoch,
    "neighbor-loader": sampled.neighbor_loader,
    "sampled-accuracy": sampled.sampled_accuracy,
    "papers100m": runs.papers,
    "queues": sharing.queues,
    "queue-use": sharing.queue_use,
    "queue-goals": sharing.queue_goals,
    "division": sharing.division,
    "division-goals": sharing.division_goals,
    "cpu": runs.cpu,
    "files": runs.kept_files,
    "estimates": planning.estimates,
    "estimate-takes": planning.estimate_takes,
    "plan-estimates": planning.plan_table,
    "accuracy": planning.accuracy,
    "accuracy-more": planning.accuracy_more,
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
