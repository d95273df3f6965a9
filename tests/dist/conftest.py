"""Ranks of these tests are forked from a process that has imported what they need; each would import it for seconds.

The command and torchrun, which are tested as processes of their own, spawn theirs.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.dist import launch

PRELOADED = ["weft.dist.launch", "weft.engine.run", "tests.dist.cases"]


def in_environment(environment: Mapping[str, str], target: Callable[..., None], given: tuple[Any, ...]) -> None:
    """What a rank does, in the environment of the test that started it, as a spawned one."""
    os.environ.clear()
    os.environ.update(environment)
    target(*given)


@pytest.fixture(scope="session", autouse=True)
def _warm_ranks() -> Iterator[None]:
    """As new as spawned ones: nothing has run in the process that they are forked from."""
    if "forkserver" not in multiprocessing.get_all_start_methods() or torch.cuda.is_available():
        yield
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    def process(target: Callable[..., None], args: tuple[Any, ...], **more: Any) -> multiprocessing.Process:
        return context.Process(target=in_environment, args=(dict(os.environ), target, args), **more)

    stand_in = SimpleNamespace(get_context=lambda _: SimpleNamespace(Pipe=context.Pipe, Process=process))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "multiprocessing", stand_in)
        yield
