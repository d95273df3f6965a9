"""Queues of these tests start with spawners that are warm already."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.warm_spawners import warm_spawners


@pytest.fixture(scope="session", autouse=True)
def _warm(home_of_the_session: None) -> Iterator[None]:
    with warm_spawners():
        yield
