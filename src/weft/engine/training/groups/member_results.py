"""MemberResults: what became of every member of a job: ended, in training, or not begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from weft.core.plan import Plan
from weft.core.task import Task
from weft.engine.base.device import environment
from weft.engine.base.graph_cache import Graphs
from weft.engine.base.model_errors import what_was_raised
from weft.engine.results.model_code import model_code
from weft.engine.results.result import Result
from weft.engine.training.event_source import EventSource
from weft.engine.training.member_progress import MemberProgress
from weft.flow.failures import is_memory_error
from weft.runtime.group import GroupRun
from weft.runtime.inference.trained_inputs import treat_inputs


class MemberResults:
    """The results of ``tasks``, by name; the code of users' modules is taken as it is before training."""

    def __init__(self, tasks: Mapping[str, Task], device: torch.device, events: EventSource, graphs: Graphs) -> None:
        self._tasks, self._device, self._events, self._graphs = tasks, device, events, graphs
        self._codes = {name: model_code(task) for name, task in tasks.items()}
        self._ended: dict[str, Result] = {}
        self._tracks: dict[str, MemberProgress] = {}  # of all members that have begun, as the sessions know them

    @property
    def all_failed(self) -> bool:
        """Whether not one member could be trained."""
        return all(result.status == "failed" for result in self._ended.values())

    @property
    def complete(self) -> bool:
        """Whether every member has ended."""
        return len(self._ended) == len(self._tasks)

    def in_order(self) -> list[Result]:
        """All results, in the order of the tasks."""
        return [self._ended[name] for name in self._tasks]

    def without_weights(self) -> list[Result]:
        """Those of members that have no model to give back."""
        return [result for result in self._ended.values() if result.model is None]

    def add(self, results: Sequence[Result]) -> None:
        """Keep the results of members that have ended."""
        self._ended |= {result.name: result for result in results}

    def follow(self, tracks: Sequence[MemberProgress]) -> None:
        """Keep how members that begin get on."""
        self._tracks |= {track.name: track for track in tracks}

    # ---- ended ---------------------------------------------------------------------------------------

    def of(self, group: GroupRun, tracks: Sequence[MemberProgress], plan: Plan) -> list[Result]:
        """The results of a trained group."""
        return [self._result(group, index, track, plan) for index, track in enumerate(tracks)]

    def _result(self, group: GroupRun, index: int, track: MemberProgress, plan: Plan) -> Result:
        model, message = self._best_model(group, index, track)
        here, stats = environment(self._device), self._graphs.true_stats(track.task)
        about_model = (group.made_dense(index), self._codes[track.name], group.best_kept(index))
        ended = (here, track.status, message, stats, *about_model)
        return Result(track.task, plan, track.metrics(), track.history(), model, *ended)

    def _best_model(self, group: GroupRun, index: int, track: MemberProgress) -> tuple[nn.Module | None, str]:
        """A member's model, and what is to be said of the member; one that cannot be copied costs that model alone."""
        try:
            return treat_inputs(group.best_model(index), track.task, group.made_dense(index)), track.message
        except Exception as error:
            if track.task.traits is not None or is_memory_error(error):
                raise
            lost = f"task {track.name!r}: trained, but its model could not be copied, so there are no weights: "
            message = "; ".join(filter(None, (track.message, lost + what_was_raised(error, track.task))))
            self._events.note(message)
            return None, message

    def never_begun(self, name: str, plan: Plan, status: str, message: str) -> None:
        """Keep and tell that a member did not begin."""
        self._ended[name] = self.without_model(name, plan, status, message)
        self._events.never_begun(self._ended[name])

    def without_model(self, name: str, plan: Plan, status: str, message: str) -> Result:
        """A member without weights, with what it recorded if something went wrong on the way."""
        metrics = {"best_epoch": 0, "epochs_run": 0, "seconds": 0.0, "seconds_per_epoch": 0.0}
        track = self._tracks.get(name)
        history = {} if track is None else track.history()
        metrics |= {"epochs_run": 0 if track is None else track.epoch}
        return Result(self._tasks[name], plan, metrics, history, None, environment(self._device), status, message)

    # ---- as they stand -------------------------------------------------------------------------------

    def standing(self, plans: Mapping[str, Plan]) -> list[Result]:
        """Every member as it stands now: those that ended, those in training, those that wait."""
        return [self._ended.get(name) or self._unfinished(name, plans[name]) for name in self._tasks]

    def _unfinished(self, name: str, plan: Plan) -> Result:
        track = self._tracks.get(name)
        if track is None or not track.rows:
            return self.without_model(name, plan, "waiting" if track is None else track.status, "")
        about = (environment(self._device), track.status, track.message)
        return Result(self._tasks[name], plan, track.metrics(), track.history(), None, *about)
