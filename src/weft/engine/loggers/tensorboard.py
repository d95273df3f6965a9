"""Logger to TensorBoard: ``tensorboard:DIR``, a folder per run and in it one per member of a sweep.

Files are opened for every event and closed again: a writer of TensorBoard's per member has a thread and an open file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.core.files import file_name
from weft.engine.loggers.tracker import Rows, Tracked, Tracker, in_cells


class TensorboardLogger(Tracker):
    """Writes scalars by epoch, settings for the HParams page, and files as texts."""

    rebuilds = True

    def __init__(self, where: str) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        super().__init__()
        folder = Path(where).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        self._event, self._summary, self._writer = event_pb2.Event, summary_pb2.Summary, RecordWriter
        self._hparams, self._text, self._folder = hparams_pb, text_pb, folder
        self._taken: set[str] = set()

    def begin(self, member: Tracked) -> int:
        if member.handle is not None:
            return 0
        name = file_name(member.name)
        if name in self._taken:
            name = f"{name}-{member.id[-8:]}"
        self._taken.add(name)
        folder = self._folder / f"{file_name(member.group or name)}-{member.run}" / (name if member.group else "")
        folder.mkdir(parents=True, exist_ok=True)
        member.handle = folder / f"events.out.tfevents.{int(self.start.time)}.weft"
        for former in folder.glob("events.out.tfevents.*.weft"):  # of the run before it was resumed
            former.unlink()
        time, settings = self.start.time, in_cells(member.settings)
        self._write(member, time, [{"file_version": "brain.Event:2"}])
        self._write(member, time, [{"summary": self._hparams(settings, trial_id=member.id, start_time_secs=time)}])
        return 0

    def log(self, member: Tracked, rows: Rows, time: float) -> None:
        self._write(member, time, [{"step": epoch, "summary": self._scalars(values)} for epoch, values in rows])

    def end(self, member: Tracked, final: Mapping[str, float], texts: Mapping[str, str], time: float) -> None:
        summaries = [self._scalars(final), *(self._text(name, text) for name, text in texts.items())]
        self._write(member, time, [{"step": member.epoch, "summary": summary} for summary in summaries])

    def _scalars(self, values: Mapping[str, float]) -> Any:
        return self._summary(value=[self._summary.Value(tag=name, simple_value=x) for name, x in values.items()])

    def _write(self, member: Tracked, time: float, events: Sequence[Mapping[str, Any]]) -> None:
        with open(member.handle, "ab") as file:
            for event in events:
                self._writer(file).write(self._event(wall_time=time, **event).SerializeToString())
