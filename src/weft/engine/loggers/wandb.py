"""Loggers to Weights & Biases and to Trackio, which has its interface: ``wandb[:PROJECT]``, ``trackio[:PROJECT]``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from contextvars import copy_context

from weft.engine.loggers.tracker import Rows, Tracked, Tracker

WELL = ("finished", "stopped", "pruned")


class WandbLogger(Tracker):
    """A run of Weights & Biases per member; those of a sweep are a group."""

    def __init__(self, project: str) -> None:
        import wandb

        super().__init__()
        self._wandb, self._project = wandb, project or None

    def begin(self, member: Tracked) -> int:
        member.handle = self._wandb.init(
            project=self._project,
            id=member.id,
            name=member.name,
            group=member.group or None,
            config=dict(member.settings),
            resume="allow",
            reinit="create_new",  # members train at the same time
            settings=self._wandb.Settings(console="off"),
        )
        return int(member.handle.step) - 1

    def log(self, member: Tracked, rows: Rows, time: float) -> None:
        for epoch, values in rows:
            member.handle.log(values, step=epoch)

    def end(self, member: Tracked, final: Mapping[str, float], texts: Mapping[str, str], time: float) -> None:
        member.handle.summary.update({**final, **texts})
        member.handle.finish(exit_code=0 if texts["status"] in WELL else 1)
        member.handle = None

    def close(self) -> None:
        for member in self.members.values():
            if member.handle is not None:
                member.handle.finish()


class TrackioLogger(WandbLogger):
    """A run of Trackio per member. What Trackio prints goes to stderr: stdout is for what was asked of the command."""

    def __init__(self, project: str) -> None:
        import trackio

        Tracker.__init__(self)
        self._trackio, self._project = trackio, project or "weft"

    def begin(self, member: Tracked) -> int:
        options = {"project": self._project, "name": f"{member.name}-{member.id}", "group": member.group or None}
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        # In a context of its own: where a run is open, init ends that one.
        with redirect_stdout(sys.stderr):
            member.handle = copy_context().run(
                self._trackio.init, config=dict(member.settings), resume="allow", **options, **quiet
            )
        return int(getattr(member.handle, "_next_step", 0)) - 1  # Trackio has no other name for it

    def end(self, member: Tracked, final: Mapping[str, float], texts: Mapping[str, str], time: float) -> None:
        member.handle.log({**final, **texts}, step=member.epoch)
        with redirect_stdout(sys.stderr):
            member.handle.finish()
        member.handle = None

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            super().close()
