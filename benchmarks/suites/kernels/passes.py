"""Forward products of some tasks beside backward products of others, on a directed graph, several ways.

A forward product sums over the in-edges of a node, a backward one over its out-edges: other rows of another
structure, so a plain kernel serves only one of them. Shapes: N nodes, F features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.baselines import cusparse
from benchmarks.baselines.cusparse_models import edge_values
from weft import ops
from weft.ops.csr.adjacency import Adjacency
from weft.ops.csr.packed import pack_csr
from weft.weave.launchers import push_triton  # noqa: F401  registers the operator that pushes
from weft.weave.merged_launch import OpCall, merged_call

Outs = list[Tensor]


class Passes:
    """Inputs of ``forward`` and ``backward`` products ``[N, F]`` each over the mean-normalised graph."""

    SIDES = ("separate", "stacked", "joined", "pull-push", "cusparse")

    def __init__(self, adj: Adjacency, forward: int, backward: int, features: int) -> None:
        self.adj = adj.mean()
        self.back = self.adj.transposed()
        sets = 4 if adj.device.type == "cuda" else 1  # rotated, so that no input sits in the cache from before
        shape = (adj.num_rows, features)
        self.sets = [
            [torch.randn(shape, device=adj.device) for _ in range(forward + backward)] for _ in range(sets)
        ]  # fmt: skip
        self.forward = forward

    def side(self, name: str, handle: cusparse.Handle | None = None) -> tuple[list[Callable[[], Outs]], float]:
        """One call a set, and the worst relative error against float64."""
        make = {
            "separate": self._separate,
            "stacked": self._stacked,
            "joined": lambda xs: self._merged(xs, push=False),
            "pull-push": lambda xs: self._merged(xs, push=True),
            "cusparse": lambda xs: self._cusparse(xs, handle),
        }[name]
        calls = [make(xs) for xs in self.sets]
        return calls, self._error(calls[-1](), self.sets[-1])

    def _separate(self, xs: Outs) -> Callable[[], Outs]:
        pulled, pushed = xs[: self.forward], xs[self.forward :]
        return lambda: [*(ops.spmm(self.adj, x) for x in pulled), *(ops.spmm(self.back, x) for x in pushed)]

    def _stacked(self, xs: Outs) -> Callable[[], Outs]:
        pulled, pushed = torch.stack(xs[: self.forward]), torch.stack(xs[self.forward :])
        return lambda: [*ops.spmm(self.adj, pulled), *ops.spmm(self.back, pushed)]

    def _merged(self, xs: Outs, push: bool) -> Callable[[], Outs]:
        """All products in one launch; the backward ones over the transpose, or pushed along the edges."""
        adj, csr, back = self.adj, pack_csr(self.adj), pack_csr(self.back, perm=True)
        scales = adj.row_scale, adj.col_scale
        calls = [OpCall("spmm", (x, None, *scales, csr, back, None)) for x in xs[: self.forward]]
        for x in xs[self.forward :]:
            pulled = OpCall("spmm", (x, None, *scales[::-1], back, csr, None))
            calls.append(OpCall("spmm_push", (x, None, *scales, csr, adj.num_cols)) if push else pulled)
        return lambda: [outputs[0] for outputs in merged_call(calls)]

    def _cusparse(self, xs: Outs, handle: cusparse.Handle | None) -> Callable[[], Outs]:
        if handle is None:
            raise RuntimeError("cuSPARSE needs a GPU")
        outs = [torch.empty_like(x) for x in xs]
        products = []
        for place, (x, out) in enumerate(zip(xs, outs, strict=True)):
            adj = self.adj if place < self.forward else self.back
            values = edge_values(adj)
            products.append(cusparse.Product(handle, adj.indptr, adj.indices, values, x, out, "default"))
        return lambda: [product() or out for product, out in zip(products, outs, strict=True)]

    def _error(self, outs: Outs, xs: Outs) -> float:
        """The worst of all products."""
        worst = 0.0
        for place, (out, x) in enumerate(zip(outs, xs, strict=True)):
            expected = exact(self.adj if place < self.forward else self.back, x)
            worst = max(worst, float((out.double() - expected).norm() / expected.norm()))
        return worst


def exact(adj: Adjacency, x: Tensor) -> Tensor:
    """``A @ x`` in float64."""
    messages = edge_values(adj).double()[:, None] * x[adj.indices.long()].double()
    return torch.zeros(adj.num_rows, x.shape[1], dtype=torch.float64, device=x.device).index_add_(
        0, adj.rows().long(), messages
    )
