"""Work lists: the order in which GPU kernels process the rows of a CSR, hubs split, equal lengths side by side.

One program per row leaves a few programs with a hub's ten thousand edges while the rest idle (measured up
to 3x slower than cuSPARSE on power-law graphs). Here every work item is bounded:

* *light* rows (of small degree) are sorted by degree and handled many to a program, one edge of each at a
  time, so that neighbours in a tile finish together;
* *heavy* rows are handled one to a program, many edges at a time;
* *hubs* (degree > chunk) are cut into chunks whose partial results a second kernel adds in a fixed order.

If clusters of the rows are known (``row_clusters.py``), rows are ordered by cluster and by degree inside it: they
gather the same rows of x while those are in the cache. A row's result does not depend on its place, so its bits stay.

There are no atomics: results are deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops.csr.adjacency import Adjacency
from weft.ops.launch.triton_lang import tl, triton


@dataclass(frozen=True)
class WorkList:
    """Work items. The first ``hub_of_partial.numel()`` heavy ones are chunks of hubs.

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

    def to(self, device: torch.device) -> WorkList:
        """The same on another device."""
        return WorkList(*(array.to(device) for array in self.tensors()))

    def tensors(self) -> list[Tensor]:
        """The arrays in the order in which kernels unpack them."""
        return [getattr(self, name) for name in self.__dataclass_fields__]


def thresholds(num_edges: int, num_rows: int) -> tuple[int, int]:
    """Degree up to which a row is light, and edges in one chunk of a hub, by the size of the graph.

    Measured on an H200 over F = 16..1024: a small graph is bound by its longest item, so items are short; a large
    one gains from light rows up to degree 64 (products shape, F = 64: 8.1 ms against 9.0 at 32 and 9.6 at 16).
    """
    if num_edges < 1 << 18:
        return 16, 256
    if num_edges < 1 << 22:
        # Few long rows (sparse features transposed): a thousand items leave most of the device waiting for memory.
        return 64, 256 if num_edges > 64 * num_rows else 1024
    return 64, 4096


def worklist(adj: Adjacency) -> WorkList:
    """The work list of an adjacency, built once per structure; by cluster after ``order_rows`` has run.

    An older list is kept: a captured step may still read it.
    """
    cluster = adj.nodes.get("clusters")
    if cluster is None:
        return worklist_by_length(adj)
    cuts = thresholds(adj.num_edges, adj.num_rows)
    return adj.structure.derived("worklist by cluster", lambda: build_worklist(adj.indptr, *cuts, cluster))


def worklist_by_length(adj: Adjacency) -> WorkList:
    """The work list without clusters."""
    cuts = thresholds(adj.num_edges, adj.num_rows)
    base = adj.structure

    def build() -> WorkList:
        if base.structure_on_host is not None:
            return build_worklist(base.structure_on_host.indptr, *cuts).to(base.device)
        return base.own_worklist() or build_worklist(adj.indptr, *cuts)

    return base.derived("worklist", build)


def build_worklist(indptr: Tensor, light: int, chunk: int, cluster: Tensor | None = None) -> WorkList:
    """Cut and sort the rows of ``indptr [N+1]``; those of a ``cluster [N]`` stay together if it is given."""
    degrees = indptr.diff().to(torch.int32)
    light_row = (degrees <= light).nonzero().squeeze(1).to(torch.int32)
    light_row = light_row[_longest_first(degrees[light_row], light, light_row, cluster)]
    single = ((degrees > light) & (degrees <= chunk)).nonzero().squeeze(1)
    single = single[_longest_first(degrees[single], chunk, single, cluster)].to(torch.int32)
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


def _longest_first(degrees: Tensor, most: int, rows: Tensor, cluster: Tensor | None) -> Tensor:
    """The order of ``rows`` of at most ``most`` edges: the longest first, cluster by cluster if those are known.

    Longest first, so that the last programs to start are the shortest.
    """
    if cluster is not None:
        degrees = degrees - cluster[rows] * (most + 1)
    return torch.sort(degrees, descending=True, stable=True).indices


# ---- Device functions that read a work list (``worklist.py``): a heavy item, or a tile of light rows


@triton.jit
def heavy_piece(piece, start, length):
    """``(first edge, edges)`` of a heavy item."""
    return tl.load(start + piece).to(tl.int64), tl.load(length + piece)


@triton.jit
def heavy_owner(piece, row, hub_row, hub_of_partial, num_partial):
    """The row of a heavy item; for a chunk, that of its hub."""
    owner = tl.load(row + piece).to(tl.int64)
    if piece < num_partial:
        owner = tl.load(hub_row + tl.load(hub_of_partial + piece)).to(tl.int64)
    return owner


@triton.jit
def heavy_row_span(piece, start, length, hub_ptr, hub_of_partial, num_partial):
    """``(first edge, edges)`` of the whole row that a heavy item belongs to; for a chunk, of its whole hub."""
    first = tl.load(start + piece).to(tl.int64)
    edges = tl.load(length + piece)
    if piece < num_partial:
        hub = tl.load(hub_of_partial + piece)
        final = tl.load(hub_ptr + hub + 1) - 1
        first = tl.load(start + tl.load(hub_ptr + hub)).to(tl.int64)
        edges = (tl.load(start + final).to(tl.int64) - first).to(tl.int32) + tl.load(length + final)
    return first, edges


@triton.jit
def light_rows(item, start, length, row, num_light):
    """``(first edge, edges, row, valid)`` of the light rows ``item [L]``."""
    valid = item < num_light
    first = tl.load(start + item, mask=valid, other=0).to(tl.int64)
    edges = tl.load(length + item, mask=valid, other=0)
    return first, edges, tl.load(row + item, mask=valid, other=0).to(tl.int64), valid
