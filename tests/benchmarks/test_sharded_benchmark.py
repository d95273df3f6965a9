"""The benchmark of the sharded kernel runs without a GPU: it makes the graphs and records its cells as skipped."""

from __future__ import annotations

import json
import sys

import torch

from benchmarks.suites import sharded
from weft import ops


def test_cells_without_a_gpu(tmp_path, monkeypatch, capsys):
    out = tmp_path / "sharded.json"
    options = ["--shapes", "arxiv", "--scale", "0.01", "--features", "8"]
    monkeypatch.setattr(sys, "argv", ["sharded", "--device", "cpu", "--out", str(out), *options])
    sharded.main()
    found = json.loads(out.read_text())
    partition = [cell for cell in found["cells"] if cell["side"].startswith("partition")]
    assert {cell["status"] for cell in partition} == {"ok"}
    assert all(cell["imbalance_2"] < 0.01 and 0 < cell["remote_share"] < 1 for cell in partition)
    assert {cell["status"] for cell in found["cells"] if cell not in partition} == {"skipped"}
    assert found["graphs"]["arxiv"]["remote_edges"] > 0
    assert "share of link" in capsys.readouterr().out


def test_the_block_is_half_of_the_graph():
    from benchmarks.harness.graphs import make_graph

    adj = make_graph("arxiv", torch.device("cpu"), 0.01).adj
    half = sharded.HalfOfAGraph(adj, "device")
    x = torch.randn(adj.num_rows, 4)
    found = ops.spmm(half.block, torch.cat([x[: half.high], x[half.halo]]))
    torch.testing.assert_close(found, ops.spmm(adj, x)[: half.high])
