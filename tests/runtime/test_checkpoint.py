"""Checkpoints: what is written comes back, and what is damaged is refused."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import save_file

from weft.core.errors import SpecError
from weft.runtime.checkpoint import FILE, FORMAT, read_checkpoint, write_checkpoint

TENSORS = {
    "weights": torch.arange(12.0).reshape(3, 4),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "epoch": torch.tensor(7),
    "present": torch.tensor([True, False]),
    "nothing": torch.zeros(0, 3),
}


def test_what_is_written_comes_back(tmp_path):
    write_checkpoint(tmp_path, TENSORS, {"epoch": 7, "name": "é"})
    read = read_checkpoint(tmp_path)
    assert read.about["epoch"] == 7
    assert read.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(read.tensors[name], tensor), name
        assert read.tensors[name].dtype == tensor.dtype


def test_one_flipped_bit_is_refused_wherever_it_is(tmp_path):
    path = write_checkpoint(tmp_path, TENSORS, {"epoch": 7})
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    draw = random.Random(0)
    bits = [draw.randrange(8 * 8, 8 * header) for _ in range(150)]
    bits += range(8 * header, 8 * len(whole), 5)
    for bit in bits:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(SpecError, match=r"not a checkpoint of Weft, or a damaged one|a checkpoint of format \d"):
            read_checkpoint(tmp_path)
    path.write_bytes(whole)
    assert read_checkpoint(tmp_path) is not None


def test_one_without_a_checksum_is_refused(tmp_path):
    save_file(TENSORS, tmp_path / FILE, metadata={"weft": json.dumps({"epoch": 7})})
    with pytest.raises(SpecError, match=r"damaged one \(it has no 'sha256'\); remove it to start afresh"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"format": str(FORMAT + 1)}, f"a checkpoint of format {FORMAT + 1}, and this version of Weft reads format"),
        ({}, r"damaged one \(it has no 'format'\); remove it to start afresh"),
    ],
    ids=["newer", "without a format"],
)
def test_another_format_is_refused_in_one_sentence(tmp_path, metadata, words):
    save_file(TENSORS, tmp_path / FILE, metadata={"weft": json.dumps({"epoch": 7}), "sha256": "0", **metadata})
    with pytest.raises(SpecError, match=words):
        read_checkpoint(tmp_path)
