"""Tests of this folder run Triton kernels on CPU tensors, in a process of their own: see test_triton_interpreter.py.

Triton decides when it is imported whether kernels are interpreted, so these are collected only where
``TRITON_INTERPRET=1`` is set.
"""

from __future__ import annotations

import os

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    # The interpreter computes with numpy, which warns where a kernel works out a value that it then masks away.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")


@pytest.fixture(params=[1, 2], ids=["one pass", "two passes"])
def passes(request, monkeypatch):
    """Attention goes in so many passes, whatever suits it."""
    from weft.ops.attention import gat_triton as attention_backward_triton  # after the interpreter was chosen
    from weft.ops.attention import gat_triton as attention_forward_triton

    for module in (attention_forward_triton, attention_backward_triton):
        monkeypatch.setattr(module, "suits_one_pass", lambda *given: request.param == 1)
    return request.param
