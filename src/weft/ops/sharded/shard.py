"""The edges of a shard in pieces, how its kernels are launched, and the reference of their sum.

    out[t, i] = row_scale[i] * (sum over local e of w[e] * x[t, j]
                                + sum over remote e of w[e] * peer[owner(e)][t, row(e)])

Shapes: T tasks, n own rows, h remote rows, F features, L local and R remote edges, P and Q local and remote pieces,
G peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.core.settings import WAYS
from weft.ops.launch.backend import accumulate_dtype


@dataclass(frozen=True)
class ShardedLaunch:
    """``ps``: neighbours of a piece. ``dist``: pairs of pieces per warp. ``warps``: per program, each with its own.

    ``ps = 0`` leaves rows whole, to compare with; only the schedules that stage all remote rows first can do that.
    ``way``: one of :mod:`weft.core.settings`. Where it is not ``"pieces"`` the others are of no matter:
    ``"tiles"`` are :mod:`weft.ops.sharded.streamed_spmm`, ``"fetched"`` sums in the order of the whole matrix.
    """

    ps: int = 16
    dist: int = 2
    warps: int = 4
    way: str = "pieces"

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise InputError(f"sharded_spmm: way={self.way!r} must be one of {', '.join(WAYS)}")
        for name, least, most in (("ps", 0, 32), ("dist", 1, 16), ("warps", 1, 16)):
            value = getattr(self, name)
            if not least <= value <= most:
                raise InputError(f"sharded_spmm: {name}={value} must be from {least} to {most}")


@dataclass(frozen=True)
class ShardedCSR:
    """The edges of a shard in pieces.

    ``local_ptr [n+1]`` and ``remote_ptr [n+1]``: pieces of every row; ``*_start`` and ``*_length``: edges of a piece.
    ``local_indices [L]``: own rows; ``remote_owner [R]`` and ``remote_row [R]``: whose row, and which;
    ``remote_place [R]``: the same as a place among the distinct remote rows ``halo_owner [h]``, ``halo_row [h]``.
    ``local_weight [L]`` and ``remote_weight [R]``: factors of the edges (None: 1).
    Remote rows may be in several chunks: chunk k has the places ``chunk_rows[k]`` to ``chunk_rows[k + 1]``, no piece
    reaches over two, and ``remote_order [Q]`` lists the pieces by chunk: ``chunk_pieces[k]`` to
    ``chunk_pieces[k + 1]``.
    """

    local_ptr: Tensor
    local_start: Tensor
    local_length: Tensor
    local_indices: Tensor
    remote_ptr: Tensor
    remote_start: Tensor
    remote_length: Tensor
    remote_owner: Tensor
    remote_row: Tensor
    remote_place: Tensor
    halo_owner: Tensor
    halo_row: Tensor
    ps: int
    remote_order: Tensor
    chunk_pieces: tuple[int, ...]
    chunk_rows: tuple[int, ...]
    local_weight: Tensor | None = None
    remote_weight: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Own rows n."""
        return self.local_ptr.numel() - 1


def sharded_spmm_torch(x: Tensor, peers: Sequence[Tensor], csr: ShardedCSR, row_scale: Tensor | None = None) -> Tensor:
    """Reference: gather every edge's row from where it lies; ``x [..., n, F]``, ``peers[g] [..., n_g, F]``."""
    acc = accumulate_dtype(x.dtype)
    out = x.new_zeros(*x.shape[:-2], csr.num_rows, x.shape[-1], dtype=acc)
    messages = x.index_select(-2, csr.local_indices.long()).to(acc)
    if csr.local_weight is not None:
        messages = messages * csr.local_weight[:, None]
    out = out.index_add(-2, _edge_rows(csr.local_ptr, csr.local_length), messages)
    rows = _edge_rows(csr.remote_ptr, csr.remote_length)
    for owner, peer in enumerate(peers):
        mine = (csr.remote_owner == owner).nonzero().squeeze(1)
        if mine.numel():
            messages = peer.to(x.device).index_select(-2, csr.remote_row[mine].long()).to(acc)
            if csr.remote_weight is not None:
                messages = messages * csr.remote_weight[mine, None]
            out = out.index_add(-2, rows[mine], messages)
    return (out if row_scale is None else out * row_scale[:, None]).to(x.dtype)


def _edge_rows(ptr: Tensor, length: Tensor) -> Tensor:
    """The row of every edge, from the pieces of rows and the edges of pieces."""
    rows = torch.arange(ptr.numel() - 1, device=ptr.device)
    return torch.repeat_interleave(torch.repeat_interleave(rows, ptr.diff().long()), length.long())


def address_table(peers: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """``(addresses [G], rows [G])`` int64 of peers' matrices ``[..., n_g, F]``, which have to be contiguous."""
    if not all(peer.is_contiguous() for peer in peers):
        raise InputError("sharded_spmm: peers' rows must be contiguous, since they are read by address")
    addresses = torch.tensor([peer.data_ptr() for peer in peers], dtype=torch.int64)
    rows = torch.tensor([peer.shape[-2] for peer in peers], dtype=torch.int64)
    return addresses.to(device), rows.to(device)


# ---- Tiles of remote rows: how large each is, and what a pipeline of them takes by the roofline.
#
# While a tile crosses the link, local edges and the tiles before it are summed. The last tile has nothing to hide
# behind, so tiles shrink: their shares fall evenly, to 2 / (k (k + 1)) of the rows.

MOST_TILES = 6
TILE_ROWS = 1 << 17  # of a tile on average, at least: below, a launch more costs more than it hides


def tile_shares(count: int) -> list[float]:
    """The shares of ``count`` tiles, the largest first."""
    whole = count * (count + 1) / 2
    return [(count - place) / whole for place in range(count)]


def tile_count(rows: int) -> int:
    """Tiles that ``rows`` remote rows are cut into."""
    return max(1, min(MOST_TILES, rows // TILE_ROWS))


def tile_ends(rows: int, count: int) -> list[int]:
    """Where the tiles of ``rows`` rows end."""
    done, ends = 0.0, []
    for share in tile_shares(count):
        done += share
        ends.append(round(rows * done))
    return [*ends[:-1], rows]


def pipelined_seconds(link: float, local: float, sums: Sequence[float], shares: Sequence[float]) -> float:
    """Seconds until the last tile is summed.

    ``link``: of all remote rows, of which a tile has its share; ``local`` and ``sums``: of summing the local edges, and
    those of each tile, with reading and writing the sums so far.
    """
    arrived, done = 0.0, local
    for share, summed in zip(shares, sums, strict=True):
        arrived += link * share
        done = max(done, arrived) + summed
    return done
