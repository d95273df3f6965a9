"""Load the operators of torch that a first step on a GPU needs, beside other work.

A process waits some ten milliseconds for the driver to load each of them when it is first called, outside of Python:
a thread that calls them on a few numbers does so while the main thread imports, plans and builds.
"""

from __future__ import annotations

import torch


def load_operators(device: torch.device) -> None:
    """Start ``device`` and call, on four numbers each, what work lists, transposes, labels and states are made with."""
    torch.cuda.synchronize(device)
    ids = torch.arange(4, device=device)
    small, values = ids.to(torch.int32), ids.float()
    values.index_select(0, ids)
    torch.sort(small, stable=True)
    torch.bincount(small)
    values.rsqrt()
    torch.cat([small, small])
    small[small <= 2]
    ids.cumsum(0)
    torch.repeat_interleave(ids, ids)
    torch.minimum(ids, ids)
    (ids + 1) // 2
    ids.diff()
    values.sum()
    torch.where(ids > 1, values, values)
    values.clone().fill_(0.0)
    torch.cuda.synchronize(device)
