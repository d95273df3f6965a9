"""``python -m weft`` is the command ``weft``."""

from __future__ import annotations

import subprocess
import sys

import weft


def test_the_package_can_be_run():
    done = subprocess.run([sys.executable, "-m", "weft", "--version"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert weft.__version__ in done.stdout
