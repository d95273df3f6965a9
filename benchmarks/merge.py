"""Put the results of new runs into ``benchmarks/results/``: newer cells replace older ones of the same key.

python -m benchmarks.merge epoch.json sweep.json
python -m benchmarks.tables
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

from benchmarks.harness.results import NotKept, merge


def main() -> None:
    """One file after another."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="what a suite's --out wrote")
    for path in parser.parse_args().files:
        try:
            print(f"{path} -> {merge(path)}")
        except NotKept as reason:
            sys.exit(str(reason))


if __name__ == "__main__":
    main()
