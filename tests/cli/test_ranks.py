"""``--ranks`` and ``--gpus``: what they ask for, and one sentence where that cannot be."""

from __future__ import annotations

import json
import sys

import pytest

import weft
from weft.cli.main import main
from weft.core.errors import SpecError

SPEC = 'graph = "demo"\n[model]\nname = "gcn"\nhidden = 8\n[train]\nepochs = 2\n'


def refusal(spec, capsys, monkeypatch, *words):
    """What `weft run` says of a mistake."""
    spec.write_text(SPEC)
    monkeypatch.setattr(sys, "argv", ["weft", "run", str(spec), *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "--ranks 0 must be at least 1"),
        (["--gpus", "0"], "--gpus 0: must be at least 1"),
        (["--gpus", "2", "--ranks", "2"], "give one of the two"),
        (["--gpus", "2", "--device", "cpu"], "--gpus 2 with --device cpu"),
        (["--gpus", "99"], "--gpus 99: this machine has"),
        (["--ranks", "2", "--weave", "merged"], "--weave merged does not go with --ranks 2"),
        (["--ranks", "2", "--features", "host"], "--features host does not go with --ranks 2"),
        (["--order", "rcm"], "--order rcm is of use over several ranks only"),
    ],
)
def test_mistakes(tmp_path, capsys, monkeypatch, words, message):
    assert message in refusal(tmp_path / "spec.toml", capsys, monkeypatch, *words)


def test_a_plan_for_several_gpus(tmp_path, capsys, monkeypatch):
    spec = tmp_path / "spec.toml"
    spec.write_text(SPEC)
    command = ["weft", "plan", str(spec), "--machine", "h200", "--gpus", "4"]
    for more in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", [*command, *more])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code in (0, None)
        if not more:
            assert "4 ranks over nvlink" in capsys.readouterr().out
    (found,) = json.loads(capsys.readouterr().out)["sharding"]
    assert found["ranks"] == 4
    assert found["speed_up"] > 0


def planned(tmp_path, capsys, monkeypatch, *more, spec=SPEC):
    """The exit code of a plan, and what it printed as data."""
    (tmp_path / "spec.toml").write_text(spec)
    command = ["weft", "plan", str(tmp_path / "spec.toml"), "--machine", "h200", "--json", *more]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as end:
        main()
    out = capsys.readouterr()
    return end.value.code, json.loads(out.out) if out.out else out.err


LARGE = 'graph = "shape:ogbn-papers100M"\n[model]\nname = "gin"\nlayers = 5\nhidden = 64\n'


def test_a_graph_beyond_one_gpu_is_planned_as_ranks_train_it(tmp_path, capsys, monkeypatch):
    """One GPU would take sampled batches of it; ranks have the whole graph, and more than a host's need the network."""
    _, alone = planned(tmp_path, capsys, monkeypatch, spec=LARGE)
    assert alone["groups"][0]["plan"]["mode"] == "sampled"
    found = {}
    for gpus in ("8", "64"):
        code, several = planned(tmp_path, capsys, monkeypatch, "--gpus", gpus, spec=LARGE)
        assert code in (0, None)
        assert several["groups"][0]["plan"]["mode"] == "full"
        (found[gpus],) = several["sharding"]
    assert (found["8"]["link"], found["64"]["link"]) == ("nvlink", "infiniband")
    assert 90 * 2**30 < found["8"]["bytes_per_rank"] < 140 * 2**30
    assert found["64"]["bytes_per_rank"] < 30 * 2**30


PRODUCTS = (
    'graph = "shape:ogbn-products"\n[model]\nname = "sage"\nhidden = 256\nlayers = 3\n'
    '[train]\nmode = "sampled"\nfanout = [15, 10, 5]\nbatch = 1024\n'
)


def test_sampled_training_is_predicted_for_several_gpus_with_what_is_assumed(tmp_path, capsys, monkeypatch):
    found = {}
    for gpus in ("2", "4", "8"):
        code, several = planned(tmp_path, capsys, monkeypatch, "--gpus", gpus, spec=PRODUCTS)
        assert code in (0, None)
        (found[gpus],) = several["sharding"]
        assert several["groups"][0]["plan"]["mode"] == "sampled"
        assert "360 GB/s" in found[gpus]["assumes"]
        assert "NVLink" in found[gpus]["assumes"]
    assert found["2"]["batch_nodes"] > found["4"]["batch_nodes"] > found["8"]["batch_nodes"]
    assert found["2"]["bytes_per_rank"] > found["8"]["bytes_per_rank"]
    assert found["2"]["epoch_seconds"] > found["8"]["epoch_seconds"] > found["8"]["overlapped_seconds"]


@pytest.mark.parametrize("places", [{"features": "cached"}, {"topology": "host"}, {"cache": "10KiB"}])
def test_places_over_ranks_are_refused(places):
    task = weft.Task(graph="demo", model="sage", mode="sampled", fanout=[3, 3], epochs=1)
    with pytest.raises(SpecError, match=r"does not go with ranks=2: every rank has its part"):
        weft.run(
            task, device="cpu", ranks=2, progress=False, placement=weft.Placement(**{"features": "cached", **places})
        )
