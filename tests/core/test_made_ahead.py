"""Things made ahead: found until they are used, the oldest let go beyond a number of bytes."""

from __future__ import annotations

from weft.core.startup import PrefetchCache


def test_what_was_found_goes_when_it_is_dropped():
    ahead: PrefetchCache[str, bytes] = PrefetchCache(100, len)
    ahead.put("a", b"1" * 40)
    ahead.put("b", b"2" * 40)
    assert ahead.find("a") == b"1" * 40
    assert ahead.find("a") is not None, "it stays until then"
    assert ahead.find("c") is None
    ahead.drop_used()
    assert (ahead.has("a"), ahead.has("b")) == (False, True)


def test_the_oldest_go_first():
    ahead: PrefetchCache[int, bytes] = PrefetchCache(100, len)
    for key in range(4):
        ahead.put(key, b"0" * 40)
    assert [ahead.has(key) for key in range(4)] == [False, False, True, True]
    ahead.put(9, b"0" * 101)
    assert not any(ahead.has(key) for key in (2, 3, 9))
