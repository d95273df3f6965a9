"""Fixtures over the graphs of ``examples.py``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.nn.examples import Example, make_example


@pytest.fixture(params=["directed", "symmetric", "empty"])
def graph(request: pytest.FixtureRequest) -> Example:
    return make_example(request.param)


@pytest.fixture
def directed() -> Example:
    return make_example("directed")


@pytest.fixture
def weighted() -> Example:
    return make_example("weighted")


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """One thread: on graphs this small a second one only waits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
