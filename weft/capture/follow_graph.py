"""Running a merged step for an Observer, which is told of every operator whose pass it belongs to.

A merged step runs without autograd: the gradients are operators like any other. Its nodes remember where they came
from.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from weft.capture.observer import Observer
from weft.capture.weave import Woven


class FollowedGraph(fx.Interpreter):
    """``followed()`` runs one step of every member, as ``woven()`` does."""

    def __init__(self, woven: Woven, observer: Observer) -> None:
        super().__init__(woven.graph_module)
        self._woven, self._observer = woven, observer

    def __call__(self) -> Any:
        """Run it; what comes after it is evaluation."""
        result = self.run(*self._woven.inputs)
        self._observer.phase = "evaluation"
        return result

    def run_node(self, n: fx.Node) -> Any:
        """One node."""
        self._observer.phase = "backward" if n.meta.get("backward") else "forward"
        return super().run_node(n)
