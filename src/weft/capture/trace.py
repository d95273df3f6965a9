"""trace: a step as a graph of operators that can be run, merged with others, and looked at.

The step works in place on tensors in fixed places; those tensors become attributes of the graph's module, so that
running the module does to them what the step would do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx


def trace(step: Callable[[], Any]) -> GraphModule:
    """The operators that ``step()`` runs, backward and update included; it is run once for this.

    On tensors without data that costs nothing. On real ones the step is taken: save and restore what it changes.
    """
    return make_fx(lambda: step(), tracing_mode="real")()  # a bound method would be taken to have an argument
