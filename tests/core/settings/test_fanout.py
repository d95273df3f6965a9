"""Fan-outs of a task: what it accepts, how it keeps them, and what they mean on a graph."""

from __future__ import annotations

import json

import pytest

from weft.core.compatibility import sampling_key
from weft.core.errors import InputError, SpecError
from weft.core.settings import most_picks, resolve, show_hop
from weft.core.sweep import Sweep
from weft.core.task import Task


def rgcn(fanout, **settings) -> Task:
    return Task(graph="g", model="rgcn", mode="sampled", fanout=fanout, **settings)


@pytest.mark.parametrize(
    ("fanout", "resolved"),
    [
        ([5, -1], (5, -1)),
        ([[1, 0, 2], 4], ((1, 0, 2), 4)),
        ([{"each": 3}, {"each": 1, "2": -1}], ((3, 3, 3), (1, 1, -1))),
        ([{0: 5}, {"1": 2, 2: 1}], ((5, 0, 0), (0, 2, 1))),
    ],
)
def test_forms(fanout, resolved):
    task = rgcn(fanout)
    assert resolve(task.fanouts, 3, (9, 9, 9)) == resolved
    again = Task.from_dict(json.loads(json.dumps(task.to_dict())))
    assert again.fanout == task.fanout
    assert hash(sampling_key(task)) == hash(sampling_key(again))


@pytest.mark.parametrize(
    "fanout", [[], [0], 5, [[]], [[0, 0]], [{}], [{"each": 0}], [{"two": 2}], [{"1": 1.5}], [[-2, 1]], [True]]
)
def test_other_values_are_refused(fanout):
    with pytest.raises(SpecError, match="must list neighbours per hop"):
        rgcn(fanout, layers=1)


@pytest.mark.parametrize(
    ("hop", "message"),
    [
        ([1, 2], "a hop of fanout has 2 numbers, but the graph has 3 relations"),
        ({"7": 1}, "fanout names relation 7, but the graph has relations 0 to 2"),
        ({"1": 1}, "fanout names relation 1, of which the graph has no edges; leave it out"),
    ],
)
def test_hops_that_do_not_fit_the_graph(hop, message):
    with pytest.raises(InputError, match=message):
        resolve([hop], 3, (9, 0, 9))
    with pytest.raises(InputError, match="need a graph whose edges have relations"):
        resolve([hop], 0, ())


def test_models_without_relations_take_one_number_per_hop():
    with pytest.raises(SpecError, match="fan-outs per relation are for models that read relations, such as rgcn; sage"):
        Task(graph="g", model="sage", fanout=[{"each": 2}, 3])


def test_in_a_sweep_lists_of_lists_are_a_grid_and_tables_are_not():
    many = Sweep(graph="g", model="rgcn", fanout=[[5, 3], [2, 2]])
    assert [task.fanout for task in many.tasks()] == [(5, 3), (2, 2)]
    one = Sweep(graph="g", model="rgcn", fanout=[{"each": 2}, {"each": 1}], lr=[0.1, 0.2])
    assert {task.fanout for task in one.tasks()} == {((("each", 2),), (("each", 1),))}


def test_in_words_and_at_most():
    assert show_hop(5) == "5"
    assert show_hop((1, -1)) == "1, all by relation"
    assert show_hop((("each", 3), (2, -1))) == "3 of each relation and all of relation 2"
    assert [most_picks(hop) for hop in (4, (1, 2), (1, -1))] == [4, 3, -1]
