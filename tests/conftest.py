"""Fixtures of all tests: a fresh home folder, so that no test reads or leaves anything outside of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from weft.core.startup import leave_out_of_collections
from weft.engine.home import HOME_VARIABLE

# Folders of `make test-rest`: real servers and kills, kernels under an interpreter, benchmarks.
REST = ("tests/serve/", "tests/ops/interpreted/", "tests/ptx/", "tests/weave/interpreted/", "tests/benchmarks/")
LONG_APART = 20  # a worker of pytest-xdist is first given fewer tests in a row


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the longer tests by their folder, before ``-m`` selects."""
    if item.nodeid.startswith(REST):
        item.add_marker(pytest.mark.rest)


@pytest.hookimpl(trylast=True)  # what is not to run has been taken out by then
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests among the first, far enough apart for different workers."""
    long = [item for item in items if item.get_closest_marker("long")]
    items[:] = [item for item in items if item not in long]
    for place, item in enumerate(long):
        items.insert(place * LONG_APART, item)


def pytest_collection_finish() -> None:
    """Libraries and tests stay: no collection of garbage looks through them, as in every process that runs Weft."""
    leave_out_of_collections()


def pytest_unconfigure() -> None:
    """So that what libraries hold is let go of in order when Python ends."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def home_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For fixtures that train before a test begins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HOME_VARIABLE, str(tmp_path_factory.mktemp("home")))
        patch.setenv("WEFT_STRICT", "1")  # a fault of the planner is raised, not noted
        yield


@pytest.fixture(autouse=True)
def home_of_the_test(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no test depends on which ran before it."""
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path_factory.mktemp("home")))
