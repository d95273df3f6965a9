"""Keep a dry run from changing what is outside of users' modules: global tables, attributes of classes, caches.

Its tensors have no data, or are of a small graph: the run that follows must not find them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn

from weft.core.errors import WeftError
from weft.core.graph_stats import GraphStats
from weft.core.task import Task
from weft.graph.data.graph import Graph
from weft.runtime.step.members.outside import Outside, uncached
from weft.runtime.user_modules.build import build_model


@contextmanager
def outside_unchanged(tasks: Sequence[Task], graph: Graph | GraphStats) -> Iterator[None]:
    """Afterwards, what is outside of the users' modules of ``tasks`` is as before; inside, no result is cached."""
    own = {str(one.model) if isinstance(one.model, str) else id(one.model): one for one in tasks if one.traits is None}
    with ExitStack() as stack:
        for model in filter(None, [_built(task, graph) for task in own.values()]):
            stack.callback(Outside(model).put_back)
            stack.enter_context(uncached(model))
        yield


def _built(task: Task, graph: Graph | GraphStats) -> nn.Module | None:
    """The module of a task; None if it cannot be built, which the dry run says in better words."""
    if isinstance(task.model, nn.Module):
        return task.model
    try:
        model = build_model(task, graph.num_features, graph.num_classes, graph.num_relations)
        return model.to("meta")  # its classes matter, and its weights may be large
    except WeftError:
        return None
