"""A run in a folder gets more seeds, settings or epochs: as if all had been run at once, nothing repeated."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.engine.small_sweeps import make_sweep, of_kind
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import SpecError


def run(work, out=None, **options):
    seen: list = []
    result = weft.run(work, **{"out": out, "progress": False, "device": "cpu", "on_event": seen.append, **options})
    return result, seen


def same(one, other) -> None:
    """Equal numbers, to the rounding of other stacks."""
    assert one.name == other.name
    assert one.status == other.status
    assert one.metrics["epochs_run"] == other.metrics["epochs_run"]
    assert one.metrics["best_epoch"] == other.metrics["best_epoch"]
    for column in other.history:
        mine, theirs = torch.tensor(one.history[column]).float(), torch.tensor(other.history[column]).float()
        assert torch.allclose(mine, theirs, atol=1e-5, equal_nan=True), column
    assert torch.allclose(one.predict_logits(), other.predict_logits(), atol=1e-4)


def test_seeds_and_settings_are_added(tmp_path):
    graph = tiny_graph()
    run(make_sweep(graph, lr=[0.01, 0.05]), tmp_path)
    former = {path: path.read_bytes() for path in (tmp_path / "groups").rglob("*.safetensors")}
    wide = make_sweep(graph, lr=[0.01, 0.05, 0.1], seed=[0, 1])
    extended, seen = run(wide, tmp_path, extend=True)
    whole, _ = run(wide)
    for one, other in zip(extended, whole, strict=True):
        same(one, other)
    assert "2 of 6 members are there already" in [event.data["message"] for event in of_kind(seen, "note")]
    # What was there was read, not trained and written again.
    assert all(path.read_bytes() == content for path, content in former.items())
    folders = sorted(path.name for path in (tmp_path / "tasks").iterdir())
    assert folders == sorted(f"lr={lr}_seed={seed}" for lr in (0.01, 0.05, 0.1) for seed in (0, 1))
    loaded = weft.read(tmp_path, graph=graph)
    assert [member.name for member in loaded] == [member.name for member in whole]
    again, _ = run(wide, tmp_path, resume=True)
    assert [member.metrics["val_loss"] for member in again] == [member.metrics["val_loss"] for member in extended]


@pytest.mark.parametrize(
    "settings", [{}, {"mode": "sampled", "fanout": [3, 3], "batch": 8}, {"patience": 4, "lr": 0.3}]
)
def test_epochs_are_added_bit_for_bit(tmp_path, settings):
    graph = tiny_graph()
    task = weft.Task(graph=graph, hidden=8, epochs=5, dropout=0.4, **settings)
    run(task, tmp_path)
    longer = task.with_values(epochs=12)
    extended, _ = run(longer, tmp_path, extend=True)
    whole, _ = run(longer)
    assert extended.history == whole.history
    assert torch.equal(extended.predict_logits(), whole.predict_logits())
    assert extended.status == whole.status


def test_epochs_and_seeds_together(tmp_path):
    graph = tiny_graph()
    run(make_sweep(graph, lr=[0.01, 0.05], epochs=4), tmp_path)
    wide = make_sweep(graph, lr=[0.01, 0.05], seed=[0, 1], epochs=9)
    extended, _ = run(wide, tmp_path, extend=True)
    whole, _ = run(wide)
    for one, other in zip(extended, whole, strict=True):
        same(one, other)


def test_members_that_ended_early_stay_as_they_are(tmp_path):
    graph = tiny_graph()
    settings = {"optimizer": "sgd", "tasks": [{"lr": 0.1}, {"lr": 1e30}]}
    run(make_sweep(graph, epochs=4, **settings), tmp_path)
    wide = make_sweep(graph, epochs=8, **settings)
    extended, _ = run(wide, tmp_path, extend=True)
    assert extended.statuses == {"finished": 1, "diverged": 1}
    assert extended[0].metrics["epochs_run"] == 8
    whole, _ = run(wide)
    assert extended[1].metrics["epochs_run"] == whole[1].metrics["epochs_run"]


def test_an_empty_folder_is_begun(tmp_path):
    result, seen = run(make_sweep(lr=[0.01, 0.05], epochs=2), tmp_path, extend=True)
    assert result.statuses == {"finished": 2}
    assert any("starting afresh" in event.data["message"] for event in of_kind(seen, "note"))


def test_what_cannot_be_extended_is_one_sentence(tmp_path):
    graph = tiny_graph()
    run(make_sweep(graph, lr=[0.01, 0.05], epochs=6), tmp_path / "sweep")
    with pytest.raises(SpecError, match=r"'lr=0\.05' is not in this sweep; extending keeps what is there"):
        run(make_sweep(graph, lr=[0.01, 0.1], epochs=6), tmp_path / "sweep", extend=True)
    with pytest.raises(SpecError, match="cannot go from 6 to 3 epochs: it has trained them already"):
        run(make_sweep(graph, lr=[0.01, 0.05], epochs=3), tmp_path / "sweep", extend=True)
    task = weft.Task(graph=graph, hidden=8, epochs=4, schedule="cosine")
    run(task, tmp_path / "one")
    with pytest.raises(SpecError, match="schedule='cosine' depends on how many there are"):
        run(task.with_values(epochs=8), tmp_path / "one", extend=True)
    task = weft.Task(graph=graph, hidden=8, epochs=4, eval_every=3)
    run(task, tmp_path / "two")
    with pytest.raises(SpecError, match="which eval_every=3 would not do on the way"):
        run(task.with_values(epochs=8), tmp_path / "two", extend=True)
    with pytest.raises(SpecError, match="needs out"):
        run(task, extend=True)
    with pytest.raises(SpecError, match="give one of the two"):
        run(task, tmp_path / "two", extend=True, overwrite=True)
    with pytest.raises(SpecError, match="holds a run already"):
        run(task, tmp_path / "two")


def test_extending_from_a_shell(tmp_path, monkeypatch, capsys):
    import sys

    from weft.cli.main import main

    tiny_graph().save(tmp_path / "graph")
    spec = tmp_path / "spec.toml"
    spec.write_text(f'graph = "{tmp_path / "graph"}"\nseed = [0, 1]\n[train]\nepochs = 2\n')
    for words in ([], ["--extend", "--set", "seed=[0, 1, 2]", "--set", "train.epochs=3"]):
        argv = ["weft", "run", str(spec), "--out", str(tmp_path / "run"), "--device", "cpu", *words]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as leaving:
            main()
        assert not leaving.value.code, capsys.readouterr().err
    result = weft.read(tmp_path / "run")
    assert [member.metrics["epochs_run"] for member in result] == [3, 3, 3]
