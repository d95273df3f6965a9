"""Launches are intercepted only in the thread and inside the context that installed the interceptor."""

from __future__ import annotations

import threading

import pytest

from weft.ops.dense.tiles_triton import _add_parts_kernel as kernel
from weft.ops.launch.backend import have_triton
from weft.ops.launch.hooks import intercepted

pytestmark = pytest.mark.skipif(not have_triton(), reason="without Triton a kernel cannot be asked for a launch")


def test_an_inner_one_is_asked_first_and_may_pass_on_to_the_outer_one():
    seen = []

    def named(name):
        def instead(asked, grid, launch):
            seen.append((name, asked is kernel, grid))
            return launch if name == "inner" else lambda *args: seen.append(args)

        return instead

    with intercepted(named("outer")), intercepted(named("inner")):
        kernel[(3,)](1, 2)
    assert seen == [("inner", True, (3,)), ("outer", True, (3,)), (1, 2)]
    kernel[(3,)]
    assert len(seen) == 3


def test_threads_may_begin_and_end_as_they_like():
    noted, second_began, first_ended = [], threading.Event(), threading.Event()

    def note(asked, grid, launch):
        noted.append(threading.current_thread().name)
        return launch

    def first():
        with intercepted(note):
            kernel[(1,)]
            assert second_began.wait(10)
        first_ended.set()
        kernel[(1,)]
        second.join(10)
        kernel[(1,)]  # whatever the other one put back

    def other():
        with intercepted(note):
            second_began.set()
            assert first_ended.wait(10)
            kernel[(1,)]  # whatever the first one put back
        kernel[(1,)]

    one, second = threading.Thread(target=first, name="first"), threading.Thread(target=other, name="second")
    one.start()
    second.start()
    one.join(10)
    assert noted == ["first", "second"]
