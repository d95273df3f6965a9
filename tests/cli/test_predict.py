"""``weft predict``: files that other programs read back."""

from __future__ import annotations

import csv
from itertools import pairwise

import torch
from safetensors.torch import load_file

from weft import Sweep, Task, read, run

NAMES = ["plain", 'says "hi"', '"begins', "a,b", "two\nlines"]


def test_predictions_by_the_users_own_ids_are_a_csv_file_whatever_the_ids(tmp_path, weft):
    with (tmp_path / "nodes.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["id", "f", "label", "split"], *([name, 1, i % 2, "train"] for i, name in enumerate(NAMES))]
        )
    with (tmp_path / "edges.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["src", "dst"], *pairwise(NAMES)])
    run(Task(str(tmp_path), epochs=1), out=tmp_path / "run", device="cpu", progress=False)
    for what in ("classes", "logits"):
        out = tmp_path / f"{what}.csv"
        assert weft("predict", tmp_path / "run", "--out", out, "--what", what)[0] == 0
        with out.open(newline="") as file:
            rows = list(csv.reader(file))
        assert [row[0] for row in rows[1:]] == NAMES
        assert {len(row) for row in rows} == {2 if what == "classes" else 3}
    out = tmp_path / "some.csv"
    assert weft("predict", tmp_path / "run", "--out", out, "--nodes", '"a,b",plain')[0] == 0
    with out.open(newline="") as file:
        assert [row[0] for row in csv.reader(file)] == ["node", "a,b", "plain"]
    result = read(tmp_path / "run")
    assert torch.equal(result.predict_logits(nodes=["a,b", "plain"]), result.predict_logits(nodes=[3, 0]))
    code, _, err = weft("predict", tmp_path / "run", "--out", out, "--nodes", "plain,0")
    assert code == 2
    assert "there is no '0' among the ids of graph" in err


def test_ids_of_nodes_samples_and_embeddings(tmp_path, weft):
    result = run(
        Task("demo", hidden=4, mode="sampled", batch=64, fanout=[3, 3], epochs=1), out=tmp_path / "run", progress=False
    )
    out, rows = tmp_path / "out.csv", {}
    for what, name, more in [
        ("logits", "class", []),
        ("embedding", "h", ["--layer", "1"]),
        ("logits", "class", ["--fanout", "-1,-1"]),
    ]:
        code = weft("predict", tmp_path / "run", "--out", out, "--nodes", "8,3", "--what", what, *more)[0]
        assert code == 0
        with out.open(newline="") as file:
            head, *rows = csv.reader(file)
        assert head[:2] == ["node", f"{name}_0"]
        assert [row[0] for row in rows] == ["8", "3"]
        values = torch.tensor([[float(value) for value in row[1:]] for row in rows])
        expected = result.embed() if what == "embedding" else result.predict_logits()
        assert torch.allclose(values, expected[[8, 3]], atol=1e-5)
    for wrong, told in [
        (["--nodes", "3,x"], "--nodes 3,x: expected numbers"),
        (["--layer", "1"], "--layer 1 is for --what embedding"),
        (["--fanout", "3"], "has 1 hops for 2 layers"),
        (["--seed", "3"], "--seed 3 would have no effect: nothing is drawn without --fanout"),
        (["--layerwise", "--fanout", "3,3"], "--layerwise would have no effect with --fanout"),
    ]:
        code, _, err = weft("predict", tmp_path / "run", "--out", out, *wrong)
        assert code == 2
        assert told in err


def test_a_member_of_a_sweep_is_exported(tmp_path, weft):
    result = run(Sweep("demo", hidden=[4, 8], epochs=1), out=tmp_path / "run", device="cpu", progress=False)
    words = ("export", tmp_path / "run", "--to", "safetensors", "--out", tmp_path / "w.safetensors")
    assert weft(*words, "--member", result[1].name)[0] == 0
    assert torch.equal(load_file(tmp_path / "w.safetensors")["convs.0.weight"], result[1].model.convs[0].weight)
    code, _, err = weft(*words, "--member", "gcn hidden=5")
    assert code == 2
    assert "--member gcn hidden=5: " in err
    assert weft("export", tmp_path / "run", "--to", "keras")[2].count("\n") == 1
