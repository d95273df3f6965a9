"""Arrays in huge pages: the advice changes no number, and small or odd arrays are left alone."""

from __future__ import annotations

import mmap
import sys

import pytest

from weft.core.host_memory import PAGE, advise_huge_pages


def test_arrays_without_a_whole_page_are_left_alone():
    assert not advise_huge_pages(PAGE + 1, PAGE)
    assert not advise_huge_pages(PAGE, PAGE - 1)
    assert not advise_huge_pages(0, 0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the advice is of Linux")
def test_memory_that_is_not_there_is_no_error():
    assert not advise_huge_pages(1 << 46, 4 * PAGE)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the advice is of Linux")
def test_advised_memory_keeps_what_is_in_it():
    import ctypes

    with mmap.mmap(-1, 4 * PAGE) as memory:
        memory[: 4 * PAGE] = bytes(range(256)) * (4 * PAGE // 256)
        here = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert advise_huge_pages(here, 4 * PAGE) in (True, False)  # a kernel without them refuses
        assert memory[: 4 * PAGE] == bytes(range(256)) * (4 * PAGE // 256)
