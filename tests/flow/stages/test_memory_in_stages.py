"""Memory that runs out in a stage is raised as it is; threads end and items are let go of, as with other errors."""

from __future__ import annotations

import gc
import weakref
from collections import deque

import pytest

from tests.flow.memory_errors import MEMORY_ERRORS
from tests.flow.stages.test_pipeline import Tracked, assert_no_threads
from weft.batches import Pipeline, Stage

pytestmark = pytest.mark.timeout(60)


def fails_in_sixth_call(error):
    calls = iter(range(1000))

    def work(item):
        if next(calls) == 5:
            raise error
        return item

    return work


@pytest.mark.parametrize("kind", MEMORY_ERRORS)
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_it_stays_what_it_is(place, depth, kind):
    error, alive = MEMORY_ERRORS[kind](), weakref.WeakSet()
    works = [lambda item: item] * 3
    works[place] = fails_in_sixth_call(error)
    stages = [Stage("make", lambda _: Tracked(alive))]
    stages += [Stage(name, work) for name, work in zip("abc", works, strict=True)]
    with pytest.raises(type(error)) as caught:
        deque(Pipeline(stages, depth).run(range(1000)), maxlen=0)
    assert caught.value is error
    assert error.__cause__ is None
    assert_no_threads()
    del caught
    error.__traceback__ = None  # its frames have items
    gc.collect()
    assert not alive


@pytest.mark.parametrize("kind", MEMORY_ERRORS)
@pytest.mark.parametrize("depth", [1, 3])
def test_that_of_the_source_too(depth, kind):
    error = MEMORY_ERRORS[kind]()

    def source():
        yield 1
        raise error

    with pytest.raises(type(error)) as caught:
        list(Pipeline([Stage("a", lambda item: item)], depth).run(source()))
    assert caught.value is error
    assert_no_threads()
