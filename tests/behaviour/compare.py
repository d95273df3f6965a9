"""``python -m tests.behaviour.compare OLD NEW``: whether two trees train, decide and plan the same on one machine.

Both trees run the cases of ``cases.py`` beside this file, one process per tree and kind of case, one after the other.
Losses, weights and decisions must be equal bit for bit, bytes of plans within 2 %; sentences are not compared. The exit
code is 1 if a case differs. ``--only KIND`` limits it to one kind (repeatable). ``--record`` writes the losses of this
tree to ``goldens.json``, which ``test_goldens.py`` compares at 1e-5: record them only with a reason that is written
down.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KINDS = ("settings", "modules", "sampled", "sharded", "queues", "plans")
BYTES_APART = 0.02
ALL_APART = float("inf")  # for what is no number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, metavar="TREE", help="the old and the new tree")
    parser.add_argument("--only", action="append", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--record", action="store_true", help="write goldens.json with the losses of this tree")
    parser.add_argument("--work", nargs=2, metavar=("KIND", "FILE"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.work:
        return work(*chosen.work)
    if chosen.record:
        return record()
    if len(chosen.trees) != 2:
        parser.error("name two trees: OLD NEW")
    missing = [tree for tree in chosen.trees if not (tree / "src" / "weft").is_dir()]
    if missing:
        parser.error(f"{missing[0]} has no src/weft; name the root of a checkout")
    return compare(*(tree.resolve() for tree in chosen.trees), chosen.only or KINDS)


def compare(old: Path, new: Path, kinds: list[str] | tuple[str, ...]) -> int:
    """Print a table with a row per kind and a line per case that differs."""
    print(f"old {old}\nnew {new}\n{'kind':<10}{'cases':>6}{'equal':>7}{'differ':>8}{'old s':>8}{'new s':>8}")
    differing = False
    for kind in kinds:
        (before, old_seconds), (after, new_seconds) = (outcomes(tree, kind) for tree in (old, new))
        apart = {}
        for name in before:
            places = list(differences(before[name], after[name]))
            if places or "failed" in before[name]:
                apart[name] = places or [("both trees", ALL_APART)]
        counts = f"{len(before):>6}{len(before) - len(apart):>7}{len(apart):>8}"
        print(f"{kind:<10}{counts}{old_seconds:>8.1f}{new_seconds:>8.1f}", flush=True)
        for name, places in apart.items():
            where, largest = max(places, key=lambda one: one[1])
            size = "not the same" if largest == ALL_APART else f"largest difference {largest:.2e}"
            print(f"  {name}: {len(places)} differences, {size} at {where}")
            for tree, found in (("old", before[name]), ("new", after[name])):
                if "failed" in found:
                    print(f"    {tree}: {found['failed']}")
        differing |= bool(apart)
    print("some cases differ" if differing else "all equal")
    return int(differing)


def outcomes(tree: Path, kind: str) -> tuple[dict[str, Any], float]:
    """The outcome of every case of ``kind`` with the Weft of ``tree``, and the wall seconds of all."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes.pickle"
        command = [sys.executable, "-W", "ignore", "-m", "tests.behaviour.compare", "--work", kind, str(file)]
        paths = os.pathsep.join([str(tree / "src"), str(ROOT)])
        settings = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "WEFT_HOME": folder, "WEFT_PROBE": "off"}
        start = time.perf_counter()
        subprocess.run(command, env={**os.environ, **settings}, cwd=folder, check=True)
        seconds = time.perf_counter() - start
        return pickle.loads(file.read_bytes()), seconds


def work(kind: str, file: str) -> int:
    """Run every case of ``kind`` with the Weft on the path and write what they come to."""
    import torch

    import weft
    from tests.behaviour.cases import CASES, outcome

    first = os.environ["PYTHONPATH"].split(os.pathsep)[0]
    if not Path(weft.__file__).is_relative_to(first):
        raise SystemExit(f"weft comes from {weft.__file__}, not from {first}: unset what puts it on the path")
    torch.set_num_threads(1)
    found = {}
    for name, case in CASES[kind]().items():
        try:
            found[name] = outcome(case)
        except Exception as error:
            found[name] = {"failed": f"{type(error).__name__}: {error}"}
    Path(file).write_bytes(pickle.dumps(found))
    return 0


def differences(old: Any, new: Any, where: str = "") -> Iterator[tuple[str, float]]:
    """Where two outcomes differ, and by how much; bytes may be 2 % apart."""
    import torch

    if isinstance(old, dict) and isinstance(new, dict):
        for key in old.keys() | new.keys():
            if key in old and key in new:
                yield from differences(old[key], new[key], f"{where}/{key}")
            else:
                yield f"{where}/{key}", ALL_APART
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        for place, (mine, theirs) in enumerate(zip(old, new, strict=True)):
            yield from differences(mine, theirs, f"{where}/{place}")
    elif isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            yield where, ALL_APART
        elif not torch.equal(_bits(old), _bits(new)):
            apart = (old.detach().to(torch.complex128) - new.detach().to(torch.complex128)).abs()
            apart[old.isnan() & new.isnan()] = 0.0  # epochs without an evaluation
            yield where, float(apart.nan_to_num(ALL_APART).max())
    elif isinstance(old, int | float) and isinstance(new, int | float) and not isinstance(old, bool):
        allowed = BYTES_APART * abs(old) if where.endswith("bytes") else 0.0
        if old != new and not abs(old - new) <= allowed:
            yield where, abs(old - new) / (abs(old) or 1.0) if where.endswith("bytes") else abs(old - new)
    elif old != new:
        yield where, ALL_APART


def _bits(values: Any) -> Any:
    """The bytes of a tensor: unlike its numbers, two that are not a number are equal if their bits are."""
    import torch

    return values.detach().contiguous().reshape(-1).view(torch.uint8)


def record() -> int:
    """Write the losses of all trainings of this tree."""
    from tests.behaviour.cases import CASES, GOLDENS, TRAININGS, losses

    found = {kind: {name: losses(kind, name) for name in CASES[kind]()} for kind in TRAININGS}
    GOLDENS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{sum(map(len, found.values()))} runs written to {GOLDENS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
