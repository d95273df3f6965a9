"""What a logger wrote, by the reader of its own library: epochs by member, with what was measured."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path

import pandas

import weft

History = dict[str, dict[int, dict[str, float]]]  # by member and epoch


def of_result(result) -> History:
    """What a run measured, without what was not."""
    members = [result] if isinstance(result, weft.Result) else result.tasks
    return {member.name: of_columns(member.history) for member in members}


def of_columns(history) -> dict[int, dict[str, float]]:
    named = [name for name in history if name != "epoch"]
    rows = {epoch: {name: history[name][epoch - 1] for name in named} for epoch in history["epoch"]}
    return {epoch: {name: x for name, x in row.items() if math.isfinite(x)} for epoch, row in rows.items()}


def single(history: History) -> History:
    """The same rounded to float32, as TensorBoard keeps numbers."""
    short = lambda x: struct.unpack("f", struct.pack("f", x))[0]  # noqa: E731
    return {
        task: {epoch: {name: short(x) for name, x in row.items()} for epoch, row in rows.items()}
        for task, rows in history.items()
    }


def of_frame(frame: pandas.DataFrame, names) -> History:
    """Of a table with a row per epoch; an epoch that is there twice fails."""
    assert not frame.duplicated(["run", "task", "epoch"]).any()
    found: History = {}
    for row in frame.to_dict("records"):
        values = {name: row[name] for name in names if name in row and math.isfinite(row[name])}
        found.setdefault(row["task"], {})[int(row["epoch"])] = values
    return found


def of_tensorboard(folder: Path, names) -> History:
    """Of every folder of a member below ``folder``."""
    found: History = {}
    for place in sorted({file.parent for file in folder.rglob("events.out.tfevents.*")}):
        for name, points in scalars(place).items():
            for step, value in points if name in names else ():
                row = found.setdefault(place.name, {}).setdefault(step, {})
                assert name not in row, "an epoch twice"
                row[name] = value
    return found


def scalars(place: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place), size_guidance={"scalars": 0}).Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def of_mlflow(uri: str, names) -> History:
    """Of all runs of the experiment ``weft`` that have metrics."""
    import mlflow

    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("weft")
    found: History = {}
    for run in client.search_runs([experiment.experiment_id]):
        for name in names if run.data.metrics else ():
            for metric in client.get_metric_history(run.info.run_id, name) if name in run.data.metrics else ():
                row = found.setdefault(run.info.run_name, {}).setdefault(metric.step, {})
                assert name not in row, "an epoch twice"
                row[name] = metric.value
    return found


def wandb_records(file: Path) -> Iterator:
    """The records of an offline run: a log in LevelDB's format of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, block, begun = file.read_bytes(), 32_768, b""
    at = 7  # after the header of the file
    while at + 7 <= len(data):
        if block - at % block < 7:  # too short for another record
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        begun += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            record = Record()
            record.ParseFromString(begun)
            begun = b""
            yield record
