"""GroupSources: where the batches of a job's groups come from, and who prepares them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from weft.core.machine import Machine
from weft.core.plan import Plan, PlanOptions
from weft.core.task import Task
from weft.engine.base.graph_cache import Graphs
from weft.engine.planning.phase_keys import phases_key
from weft.engine.planning.placing import own_policy
from weft.planner.division.adapting import Adapter
from weft.runtime.batches.source import FullGraph, MakeSource
from weft.runtime.group import GroupRun
from weft.runtime.profile_division import divided_source

if TYPE_CHECKING:
    from weft.engine.training.groups.dividing import Dividing


class GroupSources:
    """Sources of batches for groups on ``machine``.

    ``loader``: makes the batches in place of Weft's sampler; ``hardware``: who prepares batches beside the host
    (:class:`weft.flow.Hardware`; None: the GPU).
    """

    def __init__(
        self, machine: Machine, graphs: Graphs, options: PlanOptions, loader: Any = None, hardware: Any = None
    ) -> None:
        self._machine, self._graphs, self._options = machine, graphs, options
        self._loader, self._hardware = loader, hardware

    def source(self, task: Task, plan: Plan) -> MakeSource:
        """The whole graph in every step, or batches that are sampled or loaded."""
        if not task.sampled and self._loader is None:
            return FullGraph
        from weft.runtime.batches.loaded_source import loading_for  # a run on the whole graph does without
        from weft.runtime.batches.sampled_source import source_for

        if self._loader is None:
            source = source_for(task, plan, own_policy(self._options))
        else:
            source = loading_for(task, self._loader, plan)
        return self._dividing.source(source, plan)

    @cached_property
    def _dividing(self) -> Dividing:
        from weft.engine.training.groups.dividing import Dividing

        return Dividing(self._machine, self._hardware)

    def divide(self, group: GroupRun) -> tuple[Adapter | None, str]:
        """Choose who prepares the batches of ``group``, where both sides can; what adapts that later, and a remark."""
        source = divided_source(group)
        if source is None:
            return None, ""
        digest = self._graphs.stats(group.tasks[0]).fingerprint().digest
        trainer = getattr(self._hardware, "profile_key", getattr(self._hardware, "name", "gpu"))
        key = phases_key(group.tasks, group.plan.places, digest, trainer, source.division.buckets)
        plan, adapter, told = self._dividing.divide(group, key)
        if adapter is not None:
            group.plan = plan
        return adapter, told
