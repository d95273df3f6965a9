"""Settings of relational models: bases and blocks."""

from __future__ import annotations

import pytest

from weft.core.compatibility import padding_obstacle, stack_obstacle
from weft.core.errors import SpecError
from weft.core.sweep import Sweep
from weft.core.task import Task


def test_bases_and_blocks_are_one_or_the_other():
    with pytest.raises(SpecError, match="bases=2 and blocks=4 are two ways to share weights between relations"):
        Task(graph="g", model="rgcn", bases=2, blocks=4)
    with pytest.raises(SpecError, match="hidden=64 must be a multiple of blocks=5"):
        Task(graph="g", model="rgcn", blocks=5)
    with pytest.raises(SpecError, match="bases=0 must be at least 1"):
        Task(graph="g", model="rgcn", bases=0)


def test_what_stacks():
    plain, bases = Task(graph="g", model="rgcn"), Task(graph="g", model="rgcn", bases=4)
    assert "they differ in bases" in stack_obstacle([plain, bases], False)
    assert stack_obstacle([bases, bases.with_values(lr=0.1, hidden=16)], False) is None
    assert padding_obstacle(bases) is None
    assert "blocks are equal parts" in padding_obstacle(Task(graph="g", model="rgcn", blocks=4))


@pytest.mark.parametrize("fanout", [[{"each": 2}, {"each": 1}], [[2, 1, 0], [1, 1, 1]], [[2, 1, 0], 3]])
def test_a_list_of_tasks_may_have_fan_outs_per_relation(fanout):
    tasks = [Task(graph="g", model="rgcn", fanout=fanout, seed=seed, name=f"s{seed}") for seed in (0, 1)]
    for given in (tasks, [*tasks, Task(graph="g", model="gcn", name="whole")]):
        sweep = Sweep.from_tasks(given)
        assert [task.fanout for task in sweep.tasks()] == [task.fanout for task in given]
        assert Sweep.from_dict(sweep.to_dict()).tasks() == sweep.tasks()
