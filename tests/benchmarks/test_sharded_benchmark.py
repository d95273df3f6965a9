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
    said = {row["goal"]: row["verdict"] for row in found["verdicts"]}
    assert set(said.values()) == {"not measured"}
    assert found["graphs"]["arxiv"]["remote_edges"] > 0
    assert "share of link" in capsys.readouterr().out


def test_the_block_is_half_of_the_graph():
    from benchmarks.harness.graphs import make_graph

    adj = make_graph("arxiv", torch.device("cpu"), 0.01).adj
    half = sharded.HalfOfAGraph(adj, "device")
    x = torch.randn(adj.num_rows, 4)
    found = ops.spmm(half.block, torch.cat([x[: half.high], x[half.halo]]))
    torch.testing.assert_close(found, ops.spmm(adj, x)[: half.high])
    near, far = x[: half.high], x[half.high :]
    roomy = x.clone()[: half.high]
    for own in (near.clone(), roomy):
        torch.testing.assert_close(half.copied(own, far), ops.spmm(adj, x)[: half.high])
    assert roomy.data_ptr() == half._with_room(roomy, 3).data_ptr(), "rows with room below them are not copied"
    run = half.forward_pass([4, 3, 2], False, half.copied)
    assert run().shape == (half.high, 2)


def cells(streamed, fetched, apart):
    link = {"link_mb": 55.0, "copy_gb_s": 55.0, "link_share": 0.5}
    times = {"streamed": streamed, "copy all, then spmm": fetched, "gather, then spmm": fetched + 1}
    times |= {"streamed apart": apart, "pipelined": 2.0, "rows whole": 5.0}
    here = {"shape": "products", "features": 16, "status": "ok"}
    found = [{**here, "side": side, "ms": ms, **link} for side, ms in times.items()]
    return found


def test_verdicts():
    def verdict_of(goal, *times):
        rows = sharded.verdicts(cells(*times), ["products"], [16], ["gcn 2x16"])
        (found,) = [row for row in rows if row[0].startswith(goal)]
        return found[2:]

    # One millisecond of link and one of sums: hiding one behind the other gains at most twice.
    assert verdict_of("against fetching first", 1.25, 2.0, 2.0) == ("1.60x of at most 2.00x", "pass")
    assert verdict_of("against fetching first", 1.4, 2.0, 2.0) == ("1.43x of at most 2.00x", "miss")
    assert verdict_of("against no interleaving", 1.25, 2.0, 1.6) == ("1 of 1; least 1.28x (products 16)", "pass")
    assert verdict_of("against no interleaving", 1.25, 2.0, 1.4)[1] == "miss"
    assert verdict_of("forward pass", 1.0, 2.0, 2.0) == ("-", "not measured")
