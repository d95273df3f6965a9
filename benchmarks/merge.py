"""Put the results of new runs into ``benchmarks/results/``: newer cells replace older ones of the same key.

python -m benchmarks.merge epoch.json sweep.json
python -m benchmarks.tables
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.harness.results import merge


def main() -> None:
    """One file after another."""
    for name in sys.argv[1:]:
        print(f"{name} -> {merge(Path(name))}")


if __name__ == "__main__":
    main()
