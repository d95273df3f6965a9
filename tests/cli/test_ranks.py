"""``--ranks`` and ``--gpus``: what they ask for, and one sentence where that cannot be."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from weft.cli.main import main
from weft.cli.run import ranks_for
from weft.core.errors import SpecError

SPEC = 'graph = "demo"\n[model]\nname = "gcn"\nhidden = 8\n[train]\nepochs = 2\n'


@pytest.mark.parametrize(
    ("gpus", "ranks", "device", "words"),
    [
        (None, 0, "auto", "--ranks 0: must be at least 1"),
        (0, None, "auto", "--gpus 0: must be at least 1"),
        (2, 2, "auto", "give one of the two"),
        (2, None, "cpu", "--gpus 2 with --device cpu"),
        (64, None, "auto", "--ranks 64 --device"),
    ],
)
def test_mistakes(gpus, ranks, device, words):
    with pytest.raises(SpecError, match=words):
        ranks_for(gpus, ranks, device)


def test_ranks_and_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert ranks_for(None, None, "auto") == (1, "auto")
    assert ranks_for(None, 3, "cpu") == (3, "cpu")
    assert ranks_for(4, None, "auto") == (4, "cuda")


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
