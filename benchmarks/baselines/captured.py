"""Captured: a baseline's whole training step as one CUDA graph, as PyTorch's documentation captures a network.

Forward (of a compiled or an eager model), loss, backward and a capturable fused Adam are captured once and replayed;
nothing of an epoch is left to the host. A CPU has no CUDA graphs: there the step runs eagerly and is marked so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness.timing import record_graph

Step = Callable[[], None]
WARM_UP = 5  # the first compiles, the others let Adam make its state and libraries their workspaces


@dataclass(frozen=True)
class CapturedEpoch:
    """``train()`` replays the step, ``eager()`` runs it without the recording; ``note``: whether it was captured."""

    train: Step
    eager: Step
    note: dict[str, Any]


def capturable_adam(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Fused Adam whose step count is on the device, so that it can be captured; a CPU has the fused one alone."""
    on_gpu = next(model.parameters()).device.type == "cuda"
    return torch.optim.Adam(model.parameters(), lr=lr, fused=True, capturable=on_gpu)


def captured(
    model: nn.Module,
    call: Callable[[], Tensor],
    rows: Tensor,
    target: Tensor,
    optimizer: torch.optim.Optimizer,
) -> CapturedEpoch:
    """The step of ``call() [N, C]`` with cross-entropy on ``rows``; raises if a GPU cannot capture it."""
    model.train()

    def step() -> None:
        # Gradients are None when the capture begins: backward then writes them anew in every replay.
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(call()[rows], target).backward()
        optimizer.step()

    if rows.device.type != "cuda":
        return CapturedEpoch(step, step, {"captured": False, "why_not": "a CPU has no CUDA graphs: the step is eager"})
    graph, _ = record_graph(step, warmup=WARM_UP)
    return CapturedEpoch(graph.replay, step, {"captured": True})
