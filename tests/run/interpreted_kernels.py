"""Run the Triton kernels of this layer under Triton's interpreter and compare them with torch.

A program of its own, because the interpreter is chosen before Triton is imported: see test_kernels.py.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from weft.run.evaluation_triton import Scores
from weft.run.record import Recorder
from weft.run.record_triton import record_triton
from weft.run.state import State


def check_scores(classes: int, sizes: list[int], dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(classes)
    logits = torch.randn(50, classes, generator=random).mul(3).round().to(dtype)  # rounded, so that maxima tie
    rows = torch.randperm(50, generator=random)[: sum(sizes)]
    target = torch.randint(0, classes, (sum(sizes),), generator=random)
    found = Scores(rows, target, sizes, classes)(logits)
    chosen = logits[rows].float()
    losses = F.cross_entropy(chosen, target, reduction="none").split(sizes)
    hits = (chosen.argmax(1) == target).float().split(sizes)
    expected = torch.tensor([[a.mean(), b.mean()] for a, b in zip(losses, hits, strict=True)])
    assert torch.allclose(found, expected, atol=1e-5), (found, expected)


def new_state() -> State:
    return State.new(torch.zeros(2), {}, 1, seed=0, epochs=6, columns=5)


def check_record(watched: int | None, patience: int | None, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    recorder = Recorder(3, watched, patience)
    mine, plain = new_state(), new_state()
    odd = torch.tensor([0.5, 0.5, 0.25, 0.75, 1.0, 0.0, math.nan, math.inf])
    for epoch in range(6):
        likely = 6 if epoch < 4 else 8
        row = odd[torch.randint(0, likely, (5,), generator=random)]
        row[4] = odd[torch.randint(0, 7, (1,), generator=random)]
        better = record_triton(mine, row, 3, watched, patience)
        assert torch.equal(better, recorder.compare(plain, row))
        mine.step.add_(1)
        plain.step.add_(1)
    for name, tensor in plain.tensors().items():
        assert torch.equal(mine.tensors()[name].nan_to_num(-9), tensor.nan_to_num(-9)), name


if __name__ == "__main__":
    for classes, sizes in ((2, [1, 2, 3]), (7, [20, 9, 13]), (40, [50]), (3, [5, 1])):
        check_scores(classes, sizes, torch.float32)
    check_scores(7, [20, 9, 13], torch.bfloat16)
    for seed in range(6):
        for watched in (None, 4):
            for patience in (None, 1, 2):
                check_record(watched, patience, seed)
    print("equal")
