"""Let a study of Optuna choose the trials of a tuned run, with its own sampler, pruner and storage (docs/sweeps.md)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from weft.core.errors import SpecError
from weft.core.member import short
from weft.core.search_space import Choice, Range
from weft.core.settings import lower_is_better
from weft.planner.tuning import RUNG_SHARE, Search, Tuner, trial_name

NAME, RUN, BYTES = "weft_trial", "weft_run", "predicted_bytes"  # user attributes of a trial
MEMORY = "memory"  # the constraint: predicted bytes / budget - 1
BRANCH = "tasks"  # the parameter that chooses an entry of the sweep's tasks
PLAIN = (str, int, float, type(None))  # values that Optuna stores; bool is an int
FEWEST, BEST = 10, 5  # completed trials that importances need, and how many of them are the best


class OptunaTuner(Tuner):
    """Asks ``study`` for every trial, reports to it and tells it how trials end.

    A run that is resumed continues the trials that the storage has of it, whatever had become of them: nothing is
    reported twice, and a trial that was pruned ends at the same epoch.
    """

    def __init__(self, study: Any) -> None:
        super().__init__()
        if len(study.directions) != 1:
            raise SpecError(
                f"tuner: study {study.study_name!r} has {len(study.directions)} objectives; the trials of a run have "
                "one, the validation metric"
            )
        self.study, self._study = study.study_name, study
        self._trials: dict[str, Any] = {}  # those that have not ended
        self._pruned: set[str] = set()  # trials that the pruner has ended
        self._over = False  # the sampler has no settings left

    def begin(self, search: Search) -> None:
        """Check the direction, and find the trials of a run that is resumed."""
        import optuna

        if not hasattr(optuna.trial.Trial, "set_constraint"):
            raise SpecError(f"tuner: Optuna {optuna.__version__} is too old; pip install 'optuna>=5'")
        super().begin(search)
        direction = "minimize" if lower_is_better(search.metric) else "maximize"
        if self._study.direction.name.lower() != direction:
            raise SpecError(
                f"tuner: study {self.study!r} is to {self._study.direction.name.lower()} its values, which are "
                f"{search.metric} here; create it with direction={direction!r}"
            )
        self.every = max(1, round(search.epochs / RUNG_SHARE))
        frozen = self._study.get_trials(deepcopy=False) if search.run else []
        self._former = {each.user_attrs[NAME]: each for each in frozen if each.user_attrs.get(RUN) == search.run}
        names = [name for branch in search.space.branches for name in branch.varying]
        self._shared = {name for name in names if len({b.varying.get(name) for b in search.space.branches}) == 1}

    def ask(self, n: int) -> list[dict[str, Any]]:
        """Settings of ``n`` trials of the study; those that do not fit are for the driver to refuse."""
        try:
            return [self._next(trial_name(self._names)) for _ in range(0 if self._over else n)]
        except ValueError as error:
            raise SpecError(
                f"tuner: study {self.study!r} does not take the settings of this sweep: {error}; give a new study, or "
                "the settings that its trials have"
            ) from error

    def _next(self, name: str) -> dict[str, Any]:
        from optuna.trial import Trial

        former, branches = self._former.get(name), self.search.space.branches
        trial = self._study.ask() if former is None else Trial(self._study, former._trial_id)
        number = trial.suggest_categorical(BRANCH, range(len(branches))) if len(branches) > 1 else 0
        settings = dict(branches[number].fixed)
        for setting, source in branches[number].varying.items():
            label = setting if setting in self._shared else f"{setting} of {BRANCH}[{number}]"
            settings[setting] = self._suggested(trial, label, setting, source)
        if former is None:
            trial.set_user_attr(NAME, name)
            trial.set_user_attr(RUN, self.search.run)
            if need := self.search.need(settings):
                trial.set_user_attr(BYTES, need)
                trial.set_constraint(MEMORY, need / self.search.budget - 1)
        self._trials[name] = trial
        return self.named(settings)

    def _suggested(self, trial: Any, label: str, setting: str, source: Range | Choice) -> Any:
        if isinstance(source, Choice):
            stored = [value if isinstance(value, PLAIN) else str(value) for value in source.values]
            return source.values[stored.index(trial.suggest_categorical(label, stored))]
        low, high, step, whole = source.low, source.high, source.step, setting in self.search.space.whole
        if step is not None:  # the last multiple; Optuna warns of an end that is none
            high = low + step * math.floor((high - low) / step + 1e-9)
        if whole:
            ends = math.ceil(low), math.floor(high)
            return trial.suggest_int(label, *ends, step=int(step or 1), log=source.log)
        return trial.suggest_float(label, low, high, step=step, log=source.log)

    def report(self, name: str, epoch: int, row: Mapping[str, float]) -> None:
        """Report the metric as the trial's value at ``epoch``, unless the storage has it."""
        former = self._former.get(name)
        if former is None or not (former.state.is_finished() or epoch in former.intermediate_values):
            self._trials[name].report(short(row[self.search.metric]), epoch)
            if name not in self._pruned and self._trials[name].should_prune():  # at every step, as a loop asks it
                self._pruned.add(name)
        elif former.state.name == "PRUNED" and epoch >= (former.last_step or 0):
            self._pruned.add(name)

    def stop(self) -> list[str]:
        """The trials that the pruner has ended, or had at this epoch before the run was resumed."""
        pruned, self._pruned = sorted(self._pruned), set()
        return pruned

    def tell(self, name: str, summary: Mapping[str, Any]) -> None:
        """Tell the study the best value of a trial, or that it was pruned or has failed."""
        from optuna.trial import TrialState

        trial, former = self._trials.pop(name), self._former.get(name)
        self._pruned.discard(name)
        if former is not None and former.state.is_finished():
            return
        value = summary["metrics"].get(self.search.metric)
        if summary["status"] in ("finished", "stopped") and value is not None:
            outcome: dict[str, Any] = {"values": value}
        else:  # samplers learn from pruned trials that violate a constraint, not from those that failed
            pruned = summary["status"] == "pruned" or trial.constraints.get(MEMORY, 0.0) > 0
            outcome = {"state": TrialState.PRUNED if pruned else TrialState.FAIL}
        try:
            self._study.tell(trial, **outcome)
        except RuntimeError as error:  # how a sampler that has tried its whole grid ends an optimize()
            if "Study.stop" not in str(error):
                raise
            self._over = True

    def end(self, resumable: bool) -> None:
        """The run ends: trials that no other run continues have failed."""
        for name in [] if resumable else list(self._trials):
            self.tell(name, {"status": "cancelled", "metrics": {}})

    def importance(self) -> dict[str, float]:
        """The share of every setting in what makes trials good, by PED-ANOVA; empty for few trials."""
        from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
        from optuna.trial import TrialState

        complete = self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if len(complete) < FEWEST:
            return {}
        evaluator = PedAnovaImportanceEvaluator(target_quantile=max(0.1, BEST / len(complete)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return get_param_importances(self._study, evaluator=evaluator)
