"""The Triton kernels give what the torch references give, run by Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
FOLDERS = (
    Path(__file__).with_name("interpreted"),
    Path(__file__).parent / "sampling" / "interpreted",
    ROOT / "tests" / "flow" / "interpreted",
    ROOT / "tests" / "weave" / "interpreted",
)


@pytest.mark.rest
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", sorted(p for f in FOLDERS for p in f.glob("test_*.py")), ids=lambda path: path.name)
def test_kernels_under_the_interpreter(path):
    """In a process of its own: Triton decides at import whether it interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-m", "pytest", str(path), "-q", "-x"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
