"""Tests of this folder run Triton kernels on CPU tensors, in a process of their own: see test_triton_interpreter.py."""

from __future__ import annotations

import os

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    # The interpreter computes with numpy, which warns when unsigned numbers wrap around, as hashing needs.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")
