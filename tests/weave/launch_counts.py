"""What a woven step launches, how long its chain is, and its schedule run without streams: for tests."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from weft.weave.merge import Woven, operator_name
from weft.weave.recorder import StepNode
from weft.weave.step import run_node, schedule


def count_launches(woven: Woven) -> Counter[str]:
    """How many nodes of the merged graph there are of each operator, fused ones as ``"merged_call"``."""
    return Counter(name for node in woven.graph.calls if (name := operator_name(node.target)))


FREE = ("aten::_unsafe_view", "aten::new_empty", "aten::empty", "aten::empty_like")  # operators that launch nothing


def launches_something(node: StepNode) -> bool:
    """Whether a node is work for a device: it neither looks at memory another way nor only reserves it."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.name in FREE:
        return False
    is_view = any(out.alias_info is not None and not out.alias_info.is_write for out in schema.returns)
    return not is_view


def longest_chain(woven: Woven) -> int:
    """How many operators follow one another at most, each after the one before: what bounds a step on a small graph.

    Fused ones follow one another in the order in which they are issued, as they do on the stream that they share.
    """
    length: dict[StepNode, int] = {}
    last: dict[int, int] = {}  # by stream, of the fused ones
    for node in woven.graph.calls:
        before = max((length.get(other, 0) for other in (*node.meta["after"], *node.all_input_nodes)), default=0)
        stream = node.meta["stream"]
        fused = not 0 < stream <= len(woven.graph.returns.args[0])
        length[node] = max(before, last.get(stream, 0) if fused else 0) + launches_something(node)
        if fused:
            last[stream] = length[node]
    return max(length.values(), default=0)


def issued_in_order(woven: Woven, side_streams: int) -> tuple[Tensor, ...]:
    """Run the schedule of a woven step one action after another, on no stream at all; also without a GPU."""
    plan = schedule(woven, side_streams)
    values: dict[StepNode, Any] = woven.initial_values()
    for action in plan.actions:
        run_node(action.node, values)
        for node in action.drops:
            del values[node]
    return woven.returned(values)
