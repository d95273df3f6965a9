"""Run the Triton kernels of this layer under Triton's interpreter and compare them with torch.

A program of its own, because the interpreter is chosen before Triton is imported: see test_kernels.py.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from weft.core.task import Task
from weft.runtime.step.evaluation import Bookkeeper, Scores, note_triton, record_triton
from weft.runtime.step.state import State


def check_scores(classes: int, sizes: list[int], dtype: torch.dtype, lead: tuple[int, ...] = ()) -> None:
    random = torch.Generator().manual_seed(classes)
    logits = torch.randn(*lead, 50, classes, generator=random).mul(3).round().to(dtype)  # rounded: maxima tie
    rows = torch.randperm(50, generator=random)[: sum(sizes)]
    target = torch.randint(0, classes, (sum(sizes),), generator=random)
    scores = Scores(rows, target, sizes, classes)
    found, smoothing = scores(logits), torch.rand(max(math.prod(lead), 1), generator=random)
    assert found.shape == (*lead, 2 * len(sizes))
    compare_scores(logits, rows, target, sizes, found, torch.zeros_like(smoothing))
    compare_scores(logits, rows, target, sizes, scores(logits, smoothing), smoothing)


def compare_scores(logits, rows, target, sizes, found, smoothing) -> None:
    members = logits.reshape(-1, *logits.shape[-2:]), found.reshape(-1, 2 * len(sizes)), smoothing.tolist()
    for one, row, share in zip(*members, strict=True):
        chosen = one[rows].float()
        losses = F.cross_entropy(chosen, target, reduction="none", label_smoothing=share).split(sizes)
        hits = (chosen.argmax(1) == target).float().split(sizes)
        expected = torch.tensor([part.mean() for part in (*losses, *hits)])
        assert torch.allclose(row, expected, atol=1e-5), (row, expected)


def new_state(tasks: list[Task]) -> State:
    return State.new(tasks, torch.zeros(len(tasks), 2), {}, columns=5)


def check_record(watched: list[int], metric: str, tasks: list[Task], seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    recorder = Bookkeeper(tasks, 3, watched, torch.device("cpu"), metric)
    mine, plain = new_state(tasks), new_state(tasks)
    odd = torch.tensor([0.5, 0.5, 0.25, 0.75, 1.0, 0.0, math.nan, math.inf])
    for epoch in range(6):
        likely = 6 if epoch < 4 else 8
        rows = odd[torch.randint(0, likely, (len(tasks), 5), generator=random)]
        rows[:, 4] = odd[torch.randint(0, 7, (len(tasks),), generator=random)]
        better = record_triton(mine, rows, 3, recorder.rules, epoch % 2)
        assert torch.equal(better, recorder.compare(plain, rows))
        plain.steps.add_(epoch % 2)
        plain.epoch.add_(1)
    losses = torch.rand(len(tasks), generator=random)
    mine.epoch.sub_(1)
    note_triton(mine, losses, 3)
    plain.history[:, 5, 0] = losses
    plain.steps.add_(3)
    for name, tensor in plain.tensors().items():
        assert torch.equal(mine.tensors()[name].nan_to_num(-9), tensor.nan_to_num(-9)), name


if __name__ == "__main__":
    for classes, sizes in ((2, [1, 2, 3]), (7, [20, 9, 13]), (40, [50]), (3, [5, 1])):
        check_scores(classes, sizes, torch.float32)
    check_scores(7, [20, 9, 13], torch.bfloat16)
    check_scores(3, [5, 1, 7], torch.float32, lead=(3,))
    members = [Task(graph="g", epochs=6, patience=patience) for patience in (None, 1, 2)]
    members += [Task(graph="g", epochs=4), Task(graph="g", epochs=6, eval_every=2, patience=2)]
    for seed in range(6):
        for watched, metric in (([-1] * 5, "accuracy"), ([4] * 5, "accuracy"), ([4, 1, -1, 0, 3], "mse")):
            check_record(watched, metric, members, seed)
            check_record(watched[1:2], metric, members[1:2], seed)
    print("equal")
