"""``RunOptions(log=...)``: every epoch, setting and result of every member, read again by the logger's own library."""

from __future__ import annotations

import csv
import json
import logging
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pandas
import pytest

import weft
from tests.distributions import install
from tests.engine.loggers.readers import (
    of_columns,
    of_frame,
    of_mlflow,
    of_result,
    of_tensorboard,
    scalars,
    single,
    wandb_records,
)
from tests.engine.small_sweeps import make_sweep
from tests.graphs_for_tests import small, tiny_graph
from weft.core.errors import SpecError

COLUMNS = ("loss", *(f"{split}_{kind}" for split in ("train", "val", "test") for kind in ("loss", "accuracy")))
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the libraries, when they are imported
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Killed(BaseException):
    """Raised from a listener to leave a run in the middle."""


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    """No logger reaches anything outside of this folder."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def train(work, log, **options):
    return weft.run(work, progress=False, options=weft.RunOptions(log=log), **options)


def sweep(**settings):
    return make_sweep(lr=[0.01, 0.1], eval_every=3, epochs=7, **settings)


def task(**settings):
    return weft.Task(**{"graph": tiny_graph(), "epochs": 5, "name": "t", **small("gcn"), **settings})


# ---- tables ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_has_every_epoch_and_one_of_members_every_result(kind, tmp_path):
    read = pandas.read_csv if kind == "csv" else pandas.read_parquet
    file, out = tmp_path / f"all.{kind}", tmp_path / "out"
    result = train(sweep(), f"{kind}:{file}", out=out)
    frame, members = read(file), read(tmp_path / f"all.members.{kind}").set_index("task")
    assert of_frame(frame, COLUMNS) == of_result(result)
    assert set(frame["sweep"]) == {"s"}
    assert frame.groupby("task")["lr"].first().to_dict() == {member.name: member.task.lr for member in result}
    for member in result:
        row = members.loc[member.name]
        assert (row["status"], row["best_epoch"], row["lr"]) == (
            "finished",
            member.metrics["best_epoch"],
            member.task.lr,
        )
        assert row["best_val_accuracy"] == member.metrics["val_accuracy"]
        assert (row["hidden"], row["model"]) == (member.task.hidden, "gcn")
        assert Path(row["weights"]).is_file()
    assert {path.name for path in tmp_path.iterdir()} == {file.name, f"all.members.{kind}", "out"}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_runs_share_a_table_also_with_other_columns(kind, tmp_path):
    read = pandas.read_csv if kind == "csv" else pandas.read_parquet
    file = tmp_path / f"all.{kind}"
    first = train(task(), f"{kind}:{file}")
    second = train(sweep(metric="f1_macro"), f"{kind}:{file}")
    frame = read(file)
    assert frame["run"].nunique() == 2
    names = (*COLUMNS, "val_f1_macro", "train_f1_macro", "test_f1_macro")
    assert of_frame(frame, names) == {**of_result(first), **of_result(second)}
    assert len(read(tmp_path / f"all.members.{kind}")) == 3


def test_what_callbacks_log_stands_beside_its_epoch(tmp_path):
    callback = weft.Callback(lambda context: context.log(twice=2.0 * context.epoch), every=2)
    result = train(task(callbacks=[callback]), [f"csv:{tmp_path / 'a.csv'}", f"tensorboard:{tmp_path / 'tb'}"])
    frame = pandas.read_csv(tmp_path / "a.csv")
    assert of_frame(frame, COLUMNS) == of_result(result)
    assert [x for x in frame["twice"] if math.isfinite(x)] == [4.0, 8.0]
    (place,) = {file.parent for file in (tmp_path / "tb").rglob("events*")}
    assert scalars(place)["twice"] == [(2, 4.0), (4, 8.0)]


def test_a_file_that_is_no_table_is_refused_before_anything_else(tmp_path):
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SpecError, match=r"log='csv:.*notes\.csv is no table of a former log; choose another file"):
        train(task(), f"csv:{tmp_path / 'notes.csv'}", out=tmp_path / "out")
    with pytest.raises(SpecError, match=r"log='csv:.*: FileExistsError"):
        train(task(), f"csv:{tmp_path / 'notes.csv' / 'a.csv'}", out=tmp_path / "out")
    assert (tmp_path / "notes.csv").read_text() == "a,b\n1,2\n"
    assert not (tmp_path / "out").exists()


# ---- other programs --------------------------------------------------------------------------------------


def test_tensorboard_has_scalars_settings_and_files(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    result = train(sweep(model=["gcn", "sage"]), f"tensorboard:{tmp_path / 'tb'}", out=tmp_path / "out")
    (run,) = (tmp_path / "tb").iterdir()
    assert run.name.startswith("s-")
    folders = {member.name: member.name.replace(" ", "_") for member in result}
    histories = {folders[name]: rows for name, rows in of_result(result).items()}
    assert of_tensorboard(run, COLUMNS) == single(histories)
    for member in result:
        events = EventAccumulator(str(run / folders[member.name])).Reload()
        content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        settings = metadata.parse_session_start_info_plugin_data(content).hparams
        assert (settings["lr"].number_value, settings["model"].string_value) == (member.task.lr, member.task.model)
        assert not settings["residual"].bool_value
        (weights,) = events.Tensors("weights")[0].tensor_proto.string_val
        assert Path(weights.decode()).is_file()
        (best,) = events.Scalars("best_val_accuracy")
        assert best.value == pytest.approx(member.metrics["val_accuracy"], abs=1e-7)


def test_wandb_has_a_run_per_member_in_the_group_of_the_sweep(tmp_path):
    result = train(sweep(), "wandb:project", out=tmp_path / "out")
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == len(result)
    sync = [sys.executable, "-W", "ignore", "-m", "wandb", "sync", "--dry-run", *(str(file.parent) for file in files)]
    synced = subprocess.run(sync, capture_output=True, text=True, check=True)
    assert f"Would sync {len(files)} run(s)" in synced.stdout + synced.stderr
    found = {}
    for file in files:
        rows, summary = {}, {}
        for record in wandb_records(file):
            if record.HasField("run"):
                run, config = record.run, {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("history"):
                row = {item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
                       for item in record.history.item}  # fmt: skip
                rows[row["_step"]] = {name: row[name] for name in COLUMNS if name in row}
            for item in record.summary.update if record.HasField("summary") else ():
                summary[item.nested_key[0] if item.nested_key else item.key] = json.loads(item.value_json)
        assert (run.project, run.run_group) == ("project", "s")
        member = result[run.display_name]
        assert (config["lr"], config["hidden"]) == (member.task.lr, member.task.hidden)
        assert summary["best_val_accuracy"] == member.metrics["val_accuracy"]
        assert summary["status"] == "finished"
        assert Path(summary["weights"]).is_file()
        found[run.display_name] = rows
    assert found == of_result(result)


def test_mlflow_nests_members_in_a_run_of_the_sweep(tmp_path):
    import mlflow

    uri = f"file:{tmp_path / 'mlruns'}"
    result = train(sweep(), f"mlflow:{uri}", out=tmp_path / "out")
    assert of_mlflow(uri, COLUMNS) == of_result(result)
    client = mlflow.MlflowClient(uri)
    runs = client.search_runs([client.get_experiment_by_name("weft").experiment_id])
    by_name = {run.info.run_name: run for run in runs}
    assert {run.info.status for run in runs} == {"FINISHED"}
    parent = by_name.pop("s")
    assert [file.path for file in client.list_artifacts(parent.info.run_id)] == ["report.html"]
    for name, run in by_name.items():
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert float(run.data.params["lr"]) == result[name].task.lr
        assert run.data.metrics["best_val_accuracy"] == result[name].metrics["val_accuracy"]
        assert Path(run.data.tags["weft.weights"]).is_file()


def test_trackio_has_a_run_per_member(tmp_path):
    pytest.importorskip("trackio")
    import sqlite3

    result = train(sweep(), "trackio:project")
    found = {}
    with sqlite3.connect(tmp_path / "trackio" / "project.db") as database:
        for name, step, metrics in database.execute("select run_name, step, metrics from metrics order by id"):
            row = json.loads(metrics)
            member = next(member.name for member in result if name.startswith(member.name))
            if "status" in row:
                assert row["best_val_accuracy"] == result[member].metrics["val_accuracy"]
            else:
                found.setdefault(member, {})[step] = row
    assert found == of_result(result)


def test_python_logging_has_a_record_per_epoch_and_per_outcome(caplog):
    with caplog.at_level(logging.INFO, logger="mine"):
        result = train(task(), "logging:mine")
    messages = [record.getMessage() for record in caplog.records if record.name == "mine"]
    for epoch, row in of_columns(result.history).items():
        (message,) = [message for message in messages if message.startswith(f"t: epoch {epoch}: ")]
        assert f"loss {row['loss']:.6g}, " in message
    assert messages[-1].startswith("t: finished; ")
    assert caplog.records[-1].weft.kind == "finish"


# ---- runs that are left and resumed ----------------------------------------------------------------------


def read_back(kind: str, folder: Path):
    if kind == "tensorboard":
        return of_tensorboard(folder / "log", COLUMNS)
    if kind == "mlflow":
        return of_mlflow(f"file:{folder / 'log'}", COLUMNS)
    return of_frame((pandas.read_csv if kind == "csv" else pandas.read_parquet)(folder / "log"), COLUMNS)


@pytest.mark.parametrize("kind", ["csv", "parquet", "tensorboard", "mlflow"])
@pytest.mark.parametrize("at", ["rows", "checkpoint", "end"])
def test_a_resumed_run_continues_and_no_epoch_is_there_twice(kind, at, tmp_path):
    work = make_sweep(seed=[0, 1], dropout=0.5, epochs=[6, 30])
    whole = weft.run(work, progress=False)
    log = f"{kind}:{'file:' if kind == 'mlflow' else ''}{tmp_path / 'log'}"

    def kill(event):
        if event.kind == at and event.seq > 12:
            raise Killed

    options = weft.RunOptions(checkpoint_every=0.0, log=log)
    with pytest.raises(Killed):
        weft.run(work, progress=False, out=tmp_path / "out", on_event=kill, options=options)
    train(work, log, out=tmp_path / "out", resume=True)
    expected = of_result(whole)
    if kind == "tensorboard":
        expected = single({name.replace(" ", "_"): rows for name, rows in expected.items()})
    assert read_back(kind, tmp_path) == expected


@pytest.mark.parametrize("kind", ["csv", "tensorboard", "mlflow"])
def test_an_extended_run_adds_epochs_and_members(kind, tmp_path):
    log = f"{kind}:{'file:' if kind == 'mlflow' else ''}{tmp_path / 'log'}"
    train(make_sweep(seed=[0, 1], epochs=6), log, out=tmp_path / "out")
    result = train(make_sweep(seed=[0, 1, 2], epochs=9), log, out=tmp_path / "out", extend=True)
    expected = of_result(result)
    if kind == "tensorboard":
        expected = single({name.replace(" ", "_"): rows for name, rows in expected.items()})
    assert read_back(kind, tmp_path) == expected
    if kind == "csv":
        members = pandas.read_csv(tmp_path / "log.members")
        assert dict(zip(members["task"], members["epochs_run"], strict=True)) == {m.name: 9 for m in result}


@pytest.mark.rest
def test_after_a_kill_the_files_are_as_of_an_uninterrupted_run(tmp_path):
    """Also what the process had not written yet: the journal has it."""
    code = f"""
import os, signal, weft
from tests.engine.loggers.test_loggers import task, tiny_graph

def kill(event):
    if event.kind == "rows" and event.data["members"][0]["first"] > 20:
        os.kill(os.getpid(), signal.SIGKILL)

log = ["csv:{tmp_path}/a.csv", "parquet:{tmp_path}/a.parquet", "tensorboard:{tmp_path}/tb"]
options = weft.RunOptions(log=log, checkpoint_every=0.0)
weft.run(task(epochs=400), progress=False, out="{tmp_path}/out", on_event=kill, options=options)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "a.parquet").exists()
    log = [f"csv:{tmp_path}/a.csv", f"parquet:{tmp_path}/a.parquet", f"tensorboard:{tmp_path}/tb"]
    result = train(task(epochs=400), log, out=tmp_path / "out", resume=True)
    expected = of_result(result)
    assert of_frame(pandas.read_csv(tmp_path / "a.csv"), COLUMNS) == expected
    assert of_frame(pandas.read_parquet(tmp_path / "a.parquet"), COLUMNS) == expected
    (rows,) = of_tensorboard(tmp_path / "tb", COLUMNS).values()
    assert {"t": rows} == single(expected)


# ---- mistakes and faults ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("tensorbord:runs", r"log='tensorbord:runs' \(did you mean 'tensorboard'\?\) must be one of tensorboard:DIR"),
        ("csv", r"log='csv' must say where: csv:FILE"),
        (["csv:a", "csv:a"], r"log='csv:a' is given twice; leave one of them out"),
        (3, r"log=3 must be text such as 'csv:metrics.csv', or a list of such"),
    ],
)
def test_a_mistake_is_one_sentence(log, said):
    with pytest.raises(SpecError, match=said):
        weft.RunOptions(log=log)


@pytest.mark.parametrize("kind", ["tensorboard:runs", "wandb", "mlflow", "trackio", "parquet:a.parquet"])
def test_a_missing_library_is_said_before_the_first_epoch(kind, tmp_path, monkeypatch):
    name = kind.partition(":")[0]
    for library in ("tensorboard.compat.proto", "wandb", "mlflow", "trackio", "pyarrow"):
        monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        SpecError, match=rf"log='{kind}' needs .*, which is not installed: pip install 'weft-gnn\[{name}\]'"
    ):
        train(task(), kind, out="out")
    assert not Path("out").exists()


PLUGGED = """
class Lines:
    def __init__(self, where):
        self.where, self.kinds = where, []

    def __call__(self, event):
        self.kinds.append(event.kind)
        if self.where == "faulty":
            raise OSError("the line is dead")

    def resume(self, events):
        self.kinds += [f"former {event.kind}" for event in events]

    def close(self):
        with open(self.where, "a") as file:
            file.write(" ".join(self.kinds))

def no_function(where):
    return 3
"""


def test_a_logger_of_another_distribution_gets_every_event_and_the_journal(tmp_path, monkeypatch):
    entries = {"lines": "Lines", "three": "no_function"}
    install(tmp_path, monkeypatch, "plugged_loggers", PLUGGED, loggers=entries)
    kinds = []
    options = weft.RunOptions(log=f"lines:{tmp_path / 'first'}")
    weft.run(
        task(), progress=False, out=tmp_path / "out", options=options, on_event=lambda event: kinds.append(event.kind)
    )
    assert (tmp_path / "first").read_text() == " ".join(kinds)
    train(task(epochs=9), f"lines:{tmp_path / 'second'}", out=tmp_path / "out", extend=True)
    again = (tmp_path / "second").read_text()
    assert again.startswith(" ".join(f"former {kind}" for kind in kinds))
    assert again.endswith("finish")
    with pytest.raises(SpecError, match=r"log='three': the entry point in weft\.loggers made 3, which is no function"):
        train(task(), "three")
    with pytest.raises(SpecError, match=r"log='line' \(did you mean 'lines'\?\)"):
        weft.RunOptions(log="line")


def test_an_error_of_a_logger_is_reported_once_and_training_goes_on(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "plugged_faulty", PLUGGED, loggers={"lines": "Lines"})
    monkeypatch.chdir(tmp_path)
    notes = []
    with pytest.warns(RuntimeWarning, match=r"log='lines:faulty' raised OSError: the line is dead") as warned:
        result = weft.run(
            task(),
            progress=False,
            options=weft.RunOptions(log=["lines:faulty", f"csv:{tmp_path / 'a.csv'}"]),
            on_event=lambda event: notes.append(event.data["message"]) if event.kind == "note" else None,
        )
    assert len(warned) == 1
    (note,) = [note for note in notes if "faulty" in note]
    assert "training goes on, further errors of it are not reported" in note
    assert of_frame(pandas.read_csv(tmp_path / "a.csv"), COLUMNS) == of_result(result)


def test_members_that_fail_or_end_early_have_their_status(tmp_path):
    result = train(make_sweep(lr=[0.01, 1e30], optimizer="sgd"), f"csv:{tmp_path / 'a.csv'}")
    with open(tmp_path / "a.members.csv", newline="") as file:
        statuses = {row["task"]: row["status"] for row in csv.DictReader(file)}
    assert statuses == {member.name: member.status for member in result}
    assert "diverged" in statuses.values()
