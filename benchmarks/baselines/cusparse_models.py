"""GCN, SAGE, GIN and GAT over torch's sparse CSR products, which are cuSPARSE's on a GPU.

The strong hand-written baseline: values normalised once, the transpose built once, every linear map applied
on the side where the product is narrower, no gather of ``[E, F]`` anywhere.

Shapes: N nodes, E edges, F in, O out, H heads, D features of a head.
"""

from __future__ import annotations

import warnings
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.ops.csr.adjacency import Adjacency


def csr(adj: Adjacency, values: Tensor) -> Tensor:
    """``values [E]`` on the structure of ``adj`` as a torch CSR tensor, 32-bit indices kept."""
    size = (adj.num_rows, adj.num_cols)
    return torch.sparse_csr_tensor(adj.indptr, adj.indices, values, size, check_invariants=False)


def edge_values(adj: Adjacency) -> Tensor:
    """Every entry of the matrix ``[E]`` float32, scales multiplied in."""
    values = torch.ones(adj.num_edges, device=adj.device) if adj.weight is None else adj.weight
    if adj.row_scale is not None:
        values = values * adj.row_scale[adj.rows().long()]
    if adj.col_scale is not None:
        values = values * adj.col_scale[adj.indices.long()]
    return values


class Product(torch.autograd.Function):
    """``A @ x``, and ``A^T @ grad`` backward, both as CSR products."""

    @staticmethod
    def forward(ctx, x, matrix, transposed):
        ctx.transposed = transposed
        return torch.sparse.mm(matrix, x)

    @staticmethod
    def backward(ctx, grad):
        return torch.sparse.mm(ctx.transposed, grad), None, None


class HeadProduct(torch.autograd.Function):
    """``A(alpha) @ x`` for one head; backward by a CSR product (x) and a sampled dense product (alpha)."""

    @staticmethod
    def forward(ctx, alpha, x, adj):
        ctx.adj = adj
        ctx.save_for_backward(alpha, x)
        return torch.sparse.mm(csr(adj, alpha), x)

    @staticmethod
    def backward(ctx, grad):
        alpha, x = ctx.saved_tensors
        adj, back = ctx.adj, ctx.adj.transposed()
        grad = grad.contiguous()
        grad_x = torch.sparse.mm(csr(back, alpha[back.perm]), grad)
        sampled = torch.sparse.sampled_addmm(csr(adj, alpha), grad, x.t(), beta=0.0)
        return sampled.values(), grad_x, None


class SparseGraph:
    """What the layers of one model need of a graph, built before training."""

    def __init__(self, model: str, adj: Adjacency) -> None:
        chosen = {"gcn": adj.gcn, "sage": adj.mean, "gin": lambda: adj, "gat": adj.with_self_loops}[model]
        self.adj = chosen()
        with warnings.catch_warnings():  # torch calls its CSR support a beta once a process
            warnings.simplefilter("ignore")
            self._matrix = csr(self.adj, edge_values(self.adj))
            if model != "gat":
                self._transposed = csr(self.adj.transposed(), edge_values(self.adj.transposed()))
                return
        self.rows, self.cols = self.adj.rows().long(), self.adj.indices.long()

    def aggregate(self, x: Tensor) -> Tensor:
        """``A @ x``."""
        return Product.apply(x, self._matrix, self._transposed)


class GCNLayer(nn.Module):
    """``A x W + b``."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size_in, size_out, bias=False)
        self.bias = nn.Parameter(torch.zeros(size_out))
        self._narrow_out = size_out <= size_in

    def forward(self, x: Tensor, graph: SparseGraph) -> Tensor:
        if self._narrow_out:
            return graph.aggregate(self.linear(x)) + self.bias
        return F.linear(graph.aggregate(x), self.linear.weight, self.bias)


class SAGELayer(nn.Module):
    """``mean(x) W1 + x W2 + b``."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.neighbours = nn.Linear(size_in, size_out, bias=False)
        self.own = nn.Linear(size_in, size_out)
        self._narrow_out = size_out <= size_in

    def forward(self, x: Tensor, graph: SparseGraph) -> Tensor:
        if self._narrow_out:
            return graph.aggregate(self.neighbours(x)) + self.own(x)
        return self.neighbours(graph.aggregate(x)) + self.own(x)


class GINLayer(nn.Module):
    """``MLP(x + A x)`` with one hidden layer."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.first = nn.Linear(size_in, size_out)
        self.second = nn.Linear(size_out, size_out)
        self._narrow_out = size_out <= size_in

    def forward(self, x: Tensor, graph: SparseGraph) -> Tensor:
        if self._narrow_out:
            x = F.linear(x, self.first.weight)
            x = x + graph.aggregate(x) + self.first.bias
        else:
            x = self.first(x + graph.aggregate(x))
        return self.second(x.relu())


class GATLayer(nn.Module):
    """Attention per head: scores and softmax by gather and scatter, sums by one CSR product a head."""

    def __init__(self, size_in: int, size_out: int, heads: int, concat: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.concat, self.dropout = heads, concat, dropout
        self.size = size_out // heads if concat else size_out
        self.linear = nn.Linear(size_in, heads * self.size, bias=False)
        self.source = nn.Parameter(torch.randn(heads, self.size) * self.size**-0.5)
        self.target = nn.Parameter(torch.randn(heads, self.size) * self.size**-0.5)
        self.bias = nn.Parameter(torch.zeros(size_out))

    def forward(self, x: Tensor, graph: SparseGraph) -> Tensor:
        x_NHD = self.linear(x).unflatten(-1, (self.heads, self.size))
        alpha = self.coefficients(x_NHD, graph).t().contiguous()
        x_HND = x_NHD.transpose(0, 1).contiguous()
        parts = [HeadProduct.apply(alpha[h], x_HND[h], graph.adj) for h in range(self.heads)]
        if self.concat:
            return torch.cat(parts, -1) + self.bias
        return torch.stack(parts).mean(0) + self.bias

    def coefficients(self, x_NHD: Tensor, graph: SparseGraph) -> Tensor:
        """Attention after dropout ``[E, H]``."""
        source, target = (x_NHD * self.source).sum(-1), (x_NHD * self.target).sum(-1)
        scores = F.leaky_relu(source[graph.cols] + target[graph.rows], 0.2)
        index, shape = graph.rows[:, None].expand_as(scores), (graph.adj.num_rows, self.heads)
        top = scores.new_full(shape, -torch.inf).scatter_reduce(0, index, scores.detach(), "amax")
        scores = (scores - top[graph.rows]).exp()
        total = scores.new_zeros(shape).index_add(0, graph.rows, scores)
        return F.dropout(scores / total[graph.rows], self.dropout, self.training)


LAYERS = {"gcn": GCNLayer, "sage": SAGELayer, "gin": GINLayer}


class SparseGNN(nn.Module):
    """Layers with ReLU (GAT: ELU) and dropout between them, as PyG's BasicGNN has."""

    def __init__(self, name: str, sizes: list[int], heads: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.activation = nn.ELU() if name == "gat" else nn.ReLU()
        pairs = list(pairwise(sizes))
        if name == "gat":
            last = len(pairs) - 1
            layers = [GATLayer(a, b, heads, i < last, dropout) for i, (a, b) in enumerate(pairs)]
        else:
            layers = [LAYERS[name](a, b) for a, b in pairs]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, graph: SparseGraph) -> Tensor:
        """``x [N, F]`` to logits ``[N, C]``."""
        for layer in self.layers[:-1]:
            x = self.dropout(self.activation(layer(x, graph)))
        return self.layers[-1](x, graph)
