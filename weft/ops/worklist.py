"""The order in which a GPU walks the rows of an adjacency: hubs split, equal lengths side by side.

One program per row leaves a few programs with a hub's ten thousand edges while the rest idle (measured up
to 3x slower than cuSPARSE on power-law graphs). Here every piece of work is bounded:

* *light* rows (degree <= LIGHT) are sorted by degree and handled many to a program, one edge of each at a
  time, so that neighbours in a tile finish together;
* *heavy* rows are handled one to a program, many edges at a time;
* *hubs* (degree > chunk) are cut into chunks whose partial results a second kernel adds in a fixed order.

No atomics anywhere: the result is the same bits on every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops.adjacency import Adjacency

LIGHT = 32


@dataclass(frozen=True)
class WorkList:
    """Pieces of work. The first ``hub_of_partial.numel()`` heavy pieces are chunks of hubs.

    ``heavy_start/heavy_len/heavy_row [P]`` (row is -1 for a chunk of a hub), ``light_* [L]``,
    ``hub_row [B]``, ``hub_ptr [B+1]``: the partials of hub b are ``hub_ptr[b] .. hub_ptr[b+1]``.
    """

    heavy_start: Tensor
    heavy_len: Tensor
    heavy_row: Tensor
    light_start: Tensor
    light_len: Tensor
    light_row: Tensor
    hub_row: Tensor
    hub_ptr: Tensor
    hub_of_partial: Tensor

    def tensors(self) -> list[Tensor]:
        """The arrays in the order in which kernels unpack them."""
        return [getattr(self, name) for name in self.__dataclass_fields__]


def chunk_length(num_edges: int) -> int:
    """Edges in one chunk of a hub: short enough to balance a small graph, long enough to keep partials few."""
    if num_edges < 1 << 22:
        return 256
    return 1024


def worklist(adj: Adjacency) -> WorkList:
    """The work list of an adjacency, built once per structure."""
    chunk = chunk_length(adj.num_edges)
    return adj.structure.derived(("worklist", chunk), lambda: build_worklist(adj.indptr, LIGHT, chunk))


def build_worklist(indptr: Tensor, light: int, chunk: int) -> WorkList:
    """Cut and sort the rows of ``indptr [N+1]``."""
    degrees = indptr.diff().to(torch.int32)
    light_row = (degrees <= light).nonzero().squeeze(1).to(torch.int32)
    # Longest first, so that the last programs to start are the shortest.
    order = torch.sort(degrees[light_row], descending=True, stable=True).indices
    light_row = light_row[order]
    single = ((degrees > light) & (degrees <= chunk)).nonzero().squeeze(1)
    single = single[torch.sort(degrees[single], descending=True, stable=True).indices].to(torch.int32)
    hub_row = (degrees > chunk).nonzero().squeeze(1).to(torch.int32)
    pieces = (degrees[hub_row].long() + chunk - 1) // chunk
    hub_ptr = torch.zeros(hub_row.numel() + 1, dtype=torch.int64, device=indptr.device)
    torch.cumsum(pieces, 0, out=hub_ptr[1:])
    hub = torch.repeat_interleave(torch.arange(hub_row.numel(), device=indptr.device), pieces)
    position = torch.arange(hub.numel(), device=indptr.device) - hub_ptr[hub]
    offset = position * chunk
    split_len = torch.minimum(degrees[hub_row].long()[hub] - offset, torch.full_like(offset, chunk))
    split_start = indptr[hub_row].long()[hub] + offset
    return WorkList(
        heavy_start=torch.cat([split_start.to(indptr.dtype), indptr[single]]),
        heavy_len=torch.cat([split_len.to(torch.int32), degrees[single]]),
        heavy_row=torch.cat([torch.full_like(hub, -1).to(torch.int32), single]),
        light_start=indptr[light_row],
        light_len=degrees[light_row],
        light_row=light_row,
        hub_row=hub_row,
        hub_ptr=hub_ptr.to(torch.int32),
        hub_of_partial=hub.to(torch.int32),
    )
