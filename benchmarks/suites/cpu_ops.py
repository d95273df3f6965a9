"""CPU kernels, operator by operator: compiled by numba, the torch reference, and what a library offers.

    python -m benchmarks.suites.cpu_ops [--data DIR] [--graphs cora,facebook] [--out cpu_ops.json]

``weft/ops/cpu`` serves float32 and float64 by what this finds. The library is torch's CSR product (MKL) for spmm,
with the normalised values in the matrix, and torch's own relu and dropout for the epilogue.
"""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout, relu

from benchmarks.harness.recorder import Recorder, common_arguments, listed
from benchmarks.harness.timing import time_until
from benchmarks.report.markdown import print_rows
from weft.graph.catalog import shapes
from weft.graph.catalog.names import data_folders
from weft.graph.readers import read
from weft.ops import Adjacency, cpu
from weft.ops.attention.gat import attention_backward_torch, attention_forward_torch, attention_row_gradient_torch
from weft.ops.attention.gatv2 import attention_v2_backward_torch, attention_v2_forward_torch
from weft.ops.csr.packed import PackedCSR, pack_csr, unpack_csr
from weft.ops.dense.bias_act_dropout import bias_act_dropout_backward_torch, bias_act_dropout_torch
from weft.ops.sparse.edge_softmax import edge_softmax_backward_torch, edge_softmax_torch
from weft.ops.sparse.sddmm import sddmm_torch
from weft.ops.sparse.spmm import spmm_torch
from weft.ops.sparse.spmm_max import spmm_max_torch

THREADS = 2
DATA = data_folders()[0]  # $WEFT_DATA, or ~/.cache/weft/data
LIKENESS = {"facebook": ("artist", 0.2)}  # the named shape nearest to it, and how much of it
WIDTHS = (7, 16, 64, 256)
HEADS, WIDTH = 8, 8
SIDES = ("numba", "torch", "library")


def load(name: str, folder: Path) -> Adjacency:
    """GCN's matrix of a graph in ``folder``, or of a generated likeness where the file is not there."""
    file = folder / f"{name}.npz"
    if file.exists():
        return read(file).adj.gcn()
    shape, scale = LIKENESS.get(name, (name, 1.0))
    return shapes.make(shape, scale=scale).adj.gcn()


def csr_of(adj: Adjacency) -> Tensor:
    """The same matrix as torch's CSR, its values multiplied out."""
    rows, cols = adj.rows().long(), adj.indices.long()
    values = adj.row_scale[rows] * adj.col_scale[cols]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.sparse_csr_tensor(adj.indptr, adj.indices, values, (adj.num_rows, adj.num_cols))


def spmm_sides(adj: Adjacency, width: int) -> dict[str, Callable[[], Any]]:
    """GCN's aggregation."""
    x, csr, library = torch.randn(adj.num_cols, width), unpack_csr(pack_csr(adj)), csr_of(adj)
    return {
        "numba": lambda: cpu.spmm(x, None, adj.row_scale, adj.col_scale, csr),
        "torch": lambda: spmm_torch(x, None, adj.row_scale, adj.col_scale, csr),
        "library": lambda: library @ x,
    }


def epilogue_sides(adj: Adjacency, width: int) -> dict[str, Callable[[], Any]]:
    """Bias, relu and dropout of the hidden layer; the library draws its mask from a stream."""
    x, bias, rate, clock = torch.randn(adj.num_rows, width), torch.randn(width), torch.tensor(0.5), torch.tensor([1, 2])
    return {
        "numba": lambda: cpu.bias_act_dropout(x, bias, "relu", rate, clock, 0),
        "torch": lambda: bias_act_dropout_torch(x, bias, "relu", rate, clock, 0),
        "library": lambda: dropout(relu(x + bias), 0.5),
    }


def epilogue_backward_sides(adj: Adjacency, width: int) -> dict[str, Callable[[], Any]]:
    """The same backward."""
    grad, rate, clock = torch.randn(adj.num_rows, width), torch.tensor(0.5), torch.tensor([1, 2])
    return {
        "numba": lambda: cpu.bias_act_dropout_backward(grad, grad, "relu", rate, clock, 0),
        "torch": lambda: bias_act_dropout_backward_torch(grad, grad, "relu", rate, clock, 0),
    }


def elu_sides(adj: Adjacency, width: int) -> dict[str, Callable[[], Any]]:
    """ELU alone."""
    x = torch.randn(adj.num_rows, width)
    return {
        "numba": lambda: cpu.bias_act_dropout(x, None, "elu", None, None, 0),
        "torch": lambda: bias_act_dropout_torch(x, None, "elu", None, None, 0),
    }


def max_sides(adj: Adjacency, width: int) -> dict[str, Callable[[], Any]]:
    """The largest neighbour."""
    x, csr = torch.randn(adj.num_cols, width), unpack_csr(pack_csr(adj))
    return {"numba": lambda: cpu.spmm_max(x, None, csr), "torch": lambda: spmm_max_torch(x, None, csr)}


def sddmm_sides(adj: Adjacency, width: int) -> dict[str, Callable[[], Any]]:
    """A dot product for every edge."""
    a, b, csr = (
        torch.randn(adj.num_rows, width),
        torch.randn(adj.num_cols, width),
        unpack_csr(pack_csr(adj, rows=True)),
    )
    return {"numba": lambda: cpu.sddmm(a, b, 1, csr), "torch": lambda: sddmm_torch(a, b, 1, csr)}


def softmax_sides(adj: Adjacency, heads: int) -> dict[str, Callable[[], Any]]:
    """Softmax over the in-edges, forward and backward."""
    scores, csr = torch.randn(adj.num_edges, heads), unpack_csr(pack_csr(adj, rows=True))
    return {
        "numba": lambda: cpu.edge_softmax_backward(scores, cpu.edge_softmax(scores, csr), csr),
        "torch": lambda: edge_softmax_backward_torch(scores, edge_softmax_torch(scores, csr), csr),
    }


def attention_sides(adj: Adjacency, width: int) -> dict[str, Callable[[], Any]]:
    """GAT's attention with dropout, forward and backward."""
    x = torch.randn(adj.num_cols, HEADS, width)
    a_src, a_dst = torch.randn(adj.num_cols, HEADS), torch.randn(adj.num_rows, HEADS)
    random = (torch.tensor(0.5), torch.tensor([1, 2]), 0)
    csr, back = both_csr(adj)

    def numba() -> Any:
        out, plus, alpha, log_sum = cpu.attention_forward(x, a_src, a_dst, 0.2, *random, csr)
        stats, _ = attention_row_gradient_torch(out, out, plus, alpha, a_dst, log_sum, 0.2)
        delta = stats[..., 2].contiguous()
        return cpu.attention_backward(out, x, a_src, a_dst, delta, log_sum, 0.2, *random, csr, back)

    def plain() -> Any:
        out, plus, alpha, log_sum = attention_forward_torch(x, a_src, a_dst, 0.2, *random, csr)
        stats, _ = attention_row_gradient_torch(out, out, plus, alpha, a_dst, log_sum, 0.2)
        return attention_backward_torch(out, x, a_src, stats, 0.2, *random, csr)

    return {"numba": numba, "torch": plain}


def attention_v2_sides(adj: Adjacency, width: int) -> dict[str, Callable[[], Any]]:
    """GATv2's attention with dropout, forward and backward."""
    x, y, att = (
        torch.randn(adj.num_cols, HEADS, width),
        torch.randn(adj.num_rows, HEADS, width),
        torch.randn(HEADS, width),
    )
    random = (torch.tensor(0.5), torch.tensor([1, 2]), 0)
    csr, back = both_csr(adj)

    def numba() -> Any:
        out, log_sum = cpu.attention_v2_forward(x, y, att, 0.2, *random, csr)
        delta = (out * out).sum(-1)
        return cpu.attention_v2_backward(out, x, y, att, delta, log_sum, 0.2, *random, csr, back)

    def plain() -> Any:
        out, log_sum = attention_v2_forward_torch(x, y, att, 0.2, *random, csr)
        delta = (out * out).sum(-1)
        return attention_v2_backward_torch(out, x, y, att, delta, log_sum, 0.2, *random, csr)

    return {"numba": numba, "torch": plain}


def both_csr(adj: Adjacency) -> tuple[PackedCSR, PackedCSR]:
    """``adj`` and its transpose, packed."""
    return unpack_csr(pack_csr(adj, rows=True)), unpack_csr(pack_csr(adj.transposed(), perm=True))


OPERATORS: dict[str, tuple[Callable[[Adjacency, int], dict[str, Callable[[], Any]]], tuple[int, ...]]] = {
    "spmm": (spmm_sides, WIDTHS),
    "bias + relu + dropout": (epilogue_sides, (16, 64)),
    "the same backward": (epilogue_backward_sides, (16, 64)),
    "elu": (elu_sides, (64,)),
    "spmm_max": (max_sides, (64,)),
    "sddmm": (sddmm_sides, (64,)),
    "edge_softmax, both ways": (softmax_sides, (HEADS,)),
    "attention, both ways": (attention_sides, (WIDTH,)),
    "attention_v2, both ways": (attention_v2_sides, (WIDTH,)),
}


def measure(recorder: Recorder, name: str, adj: Adjacency, rounds: int) -> None:
    """Every operator; sides take turns, and the best round counts: another process may have had the cores."""
    for operator, (sides_of, widths) in OPERATORS.items():
        for width in widths:
            sides = sides_of(adj, width)
            for turn in range(rounds):
                for side, call in sides.items():
                    key = {"graph": name, "operator": operator, "width": width, "side": side, "round": turn}
                    recorder.cell(key, lambda c=call: timed(c, recorder.device), free=False)


def timed(call: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Milliseconds of one call."""
    return time_until(call, device, warmup=3, repeats=200, seconds=0.3).to_dict()


def table(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Milliseconds of every side, best round, and how many times faster numba is than the best of the others."""
    rows = []
    keys = dict.fromkeys((c["graph"], c["operator"], c["width"]) for c in cells if "operator" in c)
    for graph, operator, width in keys:
        chosen = {"graph": graph, "operator": operator, "width": width}
        row: dict[str, Any] = dict(chosen)
        for side in SIDES:
            times = [
                c["ms"]
                for c in cells
                if c["status"] == "ok" and all(c.get(k) == v for k, v in chosen.items()) and c["side"] == side
            ]
            row[side] = min(times) if times else None
        others = [row[side] for side in SIDES[1:] if row[side] is not None]
        row["faster"] = round(min(others) / row["numba"], 2) if others and row["numba"] else None
        rows.append(row)
    return rows


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.set_defaults(device="cpu")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with NAME.npz")
    parser.add_argument("--graphs", type=listed, default=["cora", "facebook"])
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    """Measure everything and print a table."""
    args = arguments()
    torch.set_num_threads(min(THREADS, torch.get_num_threads()))
    recorder = Recorder("cpu_ops", args)
    for name in args.graphs:
        adj = recorder.prepare(name, lambda n=name: load(n, args.data))
        if adj is not None:
            measure(recorder, name, adj, args.rounds)
    rows = table(recorder.cells)
    recorder.save(summary=rows)
    print_rows(
        ["graph", "operator", "width", "numba ms", "torch ms", "library ms", "numba is faster by"],
        [[r["graph"], r["operator"], r["width"], *(r[side] for side in SIDES), r["faster"]] for r in rows],
    )


if __name__ == "__main__":
    main()
