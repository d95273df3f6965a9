"""What is kept between processes is read back as written, or counts as absent; the least recently used goes first."""

from __future__ import annotations

import os

import pytest

from weft.core.keyed_store import KeyedStore


def as_tuple(data):
    return tuple(data["numbers"])


@pytest.mark.parametrize("key", ["a.json", "a.json.gz", "sub/a.json"])
@pytest.mark.parametrize("digest", ["", "code 1"])
def test_a_value_is_read_as_it_was_written(tmp_path, key, digest):
    store = KeyedStore(tmp_path / "store", digest)
    assert store.read(key, as_tuple) is None
    path = store.write(key, {"numbers": [1, 2]})
    assert path == tmp_path / "store" / key
    assert KeyedStore(tmp_path / "store", digest).read(key, as_tuple) == (1, 2)
    store.write(key, {"numbers": [3]})
    assert store.read(key, as_tuple) == (3,)
    store.remove(key)
    assert store.read(key, as_tuple) is None


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"numbers": 3}', b"\xff\xfe", b'{"digest": "code 1"}'])
@pytest.mark.parametrize("key", ["a.json", "a.json.gz"])
def test_a_damaged_value_counts_as_absent(tmp_path, key, data):
    store = KeyedStore(tmp_path, "code 1")
    store.write(key, {"numbers": [1]})
    (tmp_path / key).write_bytes(data)
    assert store.read(key, as_tuple) is None


def test_a_value_for_another_digest_counts_as_absent(tmp_path):
    KeyedStore(tmp_path, "code 1").write("a", {"numbers": [1]})
    assert KeyedStore(tmp_path, "code 2").read("a", as_tuple) is None
    KeyedStore(tmp_path, "code 2").write("a", {"numbers": [2]})
    assert KeyedStore(tmp_path, "code 1").read("a", as_tuple) is None


def test_the_least_recently_used_goes_first(tmp_path):
    store = KeyedStore(tmp_path, max_bytes=1000)
    for age, key in enumerate("abc"):
        store.write(key, {"numbers": [1] * 4})
        os.utime(tmp_path / key, (age + 1, age + 1))
    assert store.read("a", as_tuple) is not None  # and so it was used after b and c
    store.max_bytes = sum(entry.bytes for entry in store.entries())
    store.write("d", {"numbers": [1] * 4})
    assert {entry.path.name for entry in store.entries()} == {"a", "c", "d"}


def test_a_store_that_cannot_be_written_to_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    store = KeyedStore(tmp_path / "file" / "store")
    assert store.read("a", as_tuple) is None
    with pytest.raises(OSError, match="file"):
        store.write("a", {})
