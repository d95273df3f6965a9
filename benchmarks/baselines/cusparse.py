"""GCN, SAGE, GIN and GAT over torch's sparse CSR products, which are cuSPARSE's on a GPU.

The strong hand-written baseline: values normalised once, the transpose built once, every linear map applied
on the side where the product is narrower, no gather of ``[E, F]`` anywhere.

Shapes: N nodes, E edges, F in, O out, H heads, D features of a head.

``Handle`` and ``Product`` call cuSPARSE's SpMM directly, as its documentation recommends: descriptors, work space and
preprocessing are made once. ``torch.sparse.mm`` makes them anew for every call.
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys
import warnings
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.ops.csr.adjacency import Adjacency

ALGORITHMS = {"default": 0, "csr_alg1": 4, "csr_alg2": 6, "csr_alg3": 12}
INDEX_TYPES = {torch.int32: 2, torch.int64: 3}
VALUE_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
NON_TRANSPOSE, BASE_ZERO, ORDER_ROW, COMPUTE_FLOAT32 = 0, 0, 2, 0

_PRODUCT = [c_void_p, c_int, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int]
SIGNATURES = {
    "cusparseCreate": [POINTER(c_void_p)],
    "cusparseDestroy": [c_void_p],
    "cusparseSetStream": [c_void_p, c_void_p],
    "cusparseGetVersion": [c_void_p, POINTER(c_int)],
    "cusparseCreateCsr": [POINTER(c_void_p), *[c_int64] * 3, *[c_void_p] * 3, *[c_int] * 4],
    "cusparseDestroySpMat": [c_void_p],
    "cusparseCreateDnMat": [POINTER(c_void_p), *[c_int64] * 3, c_void_p, c_int, c_int],
    "cusparseDestroyDnMat": [c_void_p],
    "cusparseSpMM_bufferSize": [*_PRODUCT, POINTER(c_size_t)],
    "cusparseSpMM_preprocess": [*_PRODUCT, c_void_p],
    "cusparseSpMM": [*_PRODUCT, c_void_p],
}


def library_paths() -> list[str]:
    """Where libcusparse may be: the one torch has loaded first, then its wheels, then the system's."""
    loaded: list[str] = []
    if os.path.exists("/proc/self/maps"):
        with open("/proc/self/maps") as maps:
            loaded = sorted({line.split()[-1] for line in maps if "libcusparse.so" in line})
    wheels = [path for root in sys.path for path in glob.glob(f"{root}/nvidia/*/lib/libcusparse.so*")]
    system = glob.glob("/usr/local/cuda*/lib64/libcusparse.so*")
    return [*loaded, *wheels, *system, "libcusparse.so.12", "libcusparse.so"]


class Handle:
    """A cuSPARSE handle, with checked calls of the library that torch has loaded."""

    def __init__(self) -> None:
        torch.cuda.init()
        torch.cuda.current_blas_handle()  # makes torch load its CUDA libraries
        self._dll = self._open()
        for name, arguments in SIGNATURES.items():
            function = getattr(self._dll, name)
            function.argtypes, function.restype = arguments, c_int
        self._dll.cusparseGetErrorString.argtypes = [c_int]
        self._dll.cusparseGetErrorString.restype = c_char_p
        self.pointer = c_void_p()
        self.call("cusparseCreate", byref(self.pointer))

    @staticmethod
    def _open() -> ctypes.CDLL:
        reasons = []
        for path in library_paths():
            try:
                return ctypes.CDLL(path)
            except OSError as error:
                reasons.append(str(error))
        raise RuntimeError(f"no libcusparse could be loaded: {'; '.join(reasons)}")

    def call(self, name: str, *arguments) -> None:
        """Call a function and raise with cuSPARSE's own words if it fails."""
        status = getattr(self._dll, name)(*arguments)
        if status:
            reason = self._dll.cusparseGetErrorString(status).decode()
            raise RuntimeError(f"{name} failed with status {status}: {reason}")

    def version(self) -> int:
        """cuSPARSE's version number."""
        number = c_int()
        self.call("cusparseGetVersion", self.pointer, byref(number))
        return number.value

    def use_current_stream(self) -> None:
        """Work goes to torch's current stream (another one while a CUDA graph is recorded)."""
        self.call("cusparseSetStream", self.pointer, c_void_p(torch.cuda.current_stream().cuda_stream))


class Product:
    """``out = A @ x`` with everything but the product prepared; calling it runs the product."""

    def __init__(
        self, handle: Handle, indptr: Tensor, indices: Tensor, values: Tensor, x: Tensor, out: Tensor, algorithm: str
    ) -> None:
        self._handle = handle
        self._kept = (indptr, indices, values, x, out)
        self._one, self._zero = c_float(1.0), c_float(0.0)
        self._matrix = self._csr(indptr, indices, values, x.shape[0])
        self._x, self._out = self._dense(x), self._dense(out)
        handle.use_current_stream()
        self._arguments = [
            handle.pointer, NON_TRANSPOSE, NON_TRANSPOSE, byref(self._one), self._matrix, self._x,
            byref(self._zero), self._out, COMPUTE_FLOAT32, ALGORITHMS[algorithm],
        ]  # fmt: skip
        size = c_size_t()
        self._handle.call("cusparseSpMM_bufferSize", *self._arguments, byref(size))
        self._buffer = torch.empty(max(size.value, 1), dtype=torch.uint8, device=x.device)
        self._arguments.append(c_void_p(self._buffer.data_ptr()))
        self._handle.call("cusparseSpMM_preprocess", *self._arguments)

    def _csr(self, indptr: Tensor, indices: Tensor, values: Tensor, num_cols: int) -> c_void_p:
        descriptor = c_void_p()
        self._handle.call(
            "cusparseCreateCsr", byref(descriptor), indptr.numel() - 1, num_cols, indices.numel(),
            indptr.data_ptr(), indices.data_ptr(), values.data_ptr(),
            INDEX_TYPES[indptr.dtype], INDEX_TYPES[indices.dtype], BASE_ZERO, VALUE_TYPES[values.dtype],
        )  # fmt: skip
        return descriptor

    def _dense(self, matrix: Tensor) -> c_void_p:
        descriptor = c_void_p()
        rows, cols = matrix.shape
        self._handle.call(
            "cusparseCreateDnMat", byref(descriptor), rows, cols, cols, matrix.data_ptr(),
            VALUE_TYPES[matrix.dtype], ORDER_ROW,
        )  # fmt: skip
        return descriptor

    def __call__(self) -> None:
        self._handle.use_current_stream()
        self._handle.call("cusparseSpMM", *self._arguments)

    def close(self) -> None:
        """Destroy the descriptors."""
        self._handle.call("cusparseDestroySpMat", self._matrix)
        self._handle.call("cusparseDestroyDnMat", self._x)
        self._handle.call("cusparseDestroyDnMat", self._out)


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


class SparseProduct(torch.autograd.Function):
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
        return SparseProduct.apply(x, self._matrix, self._transposed)


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
