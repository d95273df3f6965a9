"""Find stacks of users' modules that train slower than their members one after another, by timing their steps.

Torch runs some operators far slower for several tasks at once (``vmap``) than for each, and on a large graph the rows
of one task may stay in a cache that those of several do not fit into: no prediction knows them all.
"""

from __future__ import annotations

import math

from weft.core.cost import Cost
from weft.core.plan import Plan
from weft.runtime.step.stack import Stack
from weft.runtime.step_clock import clock_of

SLOWER = 0.97  # times what the members take, from which on a stack is not worth it: less is within the noise of steps
WORTH_SECONDS = 0.1  # of the whole training: what takes less is not worth a note
# On a GPU. The optimizer and the records of an epoch are not timed, and a stack has fewer launches of them.
REPLAYED = 1.02
COMPILED = 1.25  # if the step is compiled afterwards, which changes what both take
LEAST_SECONDS = 0.1  # of the whole training, as predicted: about what timing on a GPU takes


def slower_than_alone(stack: Stack, plan: Plan) -> str | None:
    """Why ``stack`` should be taken apart, in words; None if it should not, or nothing is known."""
    members, epochs = len(stack.tasks), max(task.epochs for task in stack.tasks)
    whole = stack.source.constant and stack.source.reduce.ranks == 1
    if members < 2 or not stack.members.is_users or not is_timed(plan, whole, epochs):
        return None
    clock = clock_of(stack, plan)
    one = clock.alone(stack)
    if one is None or members * one * epochs < clock.spent:
        return None
    alone, together = members * one, math.inf
    for _ in range(clock.attempts):
        together = min(together, clock.together(stack))
        if together <= most_seconds(alone, epochs, plan) or math.isinf(together):
            return None
    return f"a step of the stack takes {together * 1e3:.3g} ms, the steps of its members {alone * 1e3:.3g} ms"


def is_timed(plan: Plan, whole: bool, epochs: int) -> bool:
    """Whether timing a stack of ``plan`` can repay: on a GPU not for trainings that are shorter than that.

    Nor where batches are sampled, which the members of a stack share: only steps are timed.
    """
    if plan.device == "cpu":
        return True
    predicted = Cost.from_dict(plan.cost).epoch_seconds * epochs if plan.cost else math.inf
    return whole and predicted >= LEAST_SECONDS


def most_seconds(alone: float, epochs: int, plan: Plan) -> float:
    """What a step of a stack may take without being taken apart, if its members' steps take ``alone`` in turn."""
    if plan.device != "cpu":
        return (COMPILED if plan.compiled else REPLAYED) * alone
    short = (1 - SLOWER) * alone * epochs < WORTH_SECONDS
    return alone + WORTH_SECONDS / epochs if short else SLOWER * alone
