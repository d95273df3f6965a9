"""Logger to MLflow: ``mlflow`` or ``mlflow:URI``, in the experiment $MLFLOW_EXPERIMENT_NAME, else ``weft``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from weft.core.event import Event
from weft.engine.loggers.tracker import Rows, Tracked, Tracker, in_cells

STATUSES = {"finished": "FINISHED", "stopped": "FINISHED", "pruned": "FINISHED", "diverged": "FAILED"}
MOST_PARAMETERS, MOST_METRICS = 100, 1000  # in one call
LONGEST = 6000  # characters of a parameter


class MlflowLogger(Tracker):
    """A run of MLflow per member; those of a sweep are nested in one for the sweep, which gets the report."""

    def __init__(self, uri: str) -> None:
        import mlflow

        super().__init__()
        self._entities = mlflow.entities
        self._client = mlflow.MlflowClient(tracking_uri=uri or None)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "weft")
        known = self._client.get_experiment_by_name(name)
        self._experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        self._parent = ""

    def begin(self, member: Tracked) -> int:
        if member.group and not self._parent:
            self._parent, _ = self._run(member.run, member.group)
        parent = {"mlflow.parentRunId": self._parent} if member.group else {}
        member.handle, is_new = self._run(member.id, member.name, **parent)
        if not is_new:
            return max((metric.step for metric in self._client.get_metric_history(member.handle, "loss")), default=0)
        given = in_cells(member.settings).items()
        parameters = [self._entities.Param(key(name), str(value)[:LONGEST]) for name, value in given]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(member.handle, params=parameters[first : first + MOST_PARAMETERS])
        return 0

    def log(self, member: Tracked, rows: Rows, time: float) -> None:
        metrics = [
            self._entities.Metric(key(name), value, int(time * 1000), epoch)
            for epoch, values in rows
            for name, value in values.items()
        ]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(member.handle, metrics=metrics[first : first + MOST_METRICS])

    def end(self, member: Tracked, final: Mapping[str, float], texts: Mapping[str, str], time: float) -> None:
        self.log(member, [(member.epoch, dict(final))], time)
        for name, value in texts.items():
            self._client.set_tag(member.handle, f"weft.{name}", value)
        if "report" in texts:
            self._client.log_artifact(member.handle, texts["report"])
        self._client.set_terminated(member.handle, STATUSES.get(texts["status"], "KILLED"))
        member.handle = None

    def finish(self, event: Event) -> None:
        if self._parent:
            if "report" in event.data:
                self._client.log_artifact(self._parent, event.data["report"])
            self._client.set_terminated(self._parent, STATUSES.get(event.data["status"], "KILLED"))
            self._parent = ""

    def close(self) -> None:
        for run in [*(member.handle for member in self.members.values()), self._parent]:
            if run:
                self._client.set_terminated(run, "KILLED")

    def _run(self, id: str, name: str, **tags: str) -> tuple[str, bool]:
        """The run with the tag ``weft.id``, and whether it is new."""
        if found := self.resumed and self._client.search_runs([self._experiment], f"tags.`weft.id` = '{id}'"):
            self._client.update_run(found[0].info.run_id, status="RUNNING")
            return found[0].info.run_id, False
        tags = {"mlflow.runName": name, "weft.id": id, **tags}
        return self._client.create_run(self._experiment, tags=tags).info.run_id, True


def key(name: str) -> str:
    """``name`` without what MLflow refuses."""
    return re.sub(r"[^\w\-./ ]", "_", name)
