"""What callbacks read and record: the norm of the gradient, and numbers of their own."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import weft
from tests.engine.small_sweeps import make_sweep, of_kind
from tests.graphs_for_tests import tiny_graph
from tests.runtime.loop.plain_loop import EPOCHS, Net, cross_entropy, train_plainly

QUICK = {"device": "cpu", "progress": False}


class Killed(BaseException):
    """Raised from a listener to leave a run in the middle."""


def log_norm(context):
    context.log(norm=context.gradient_norm)


NORM = [weft.Callback(log_norm, every=1)]
PLAIN = {
    "plain": ({}, {}),
    "clipped": ({"clip_norm": 0.05}, {"clip": lambda ps: clip_grad_norm_(ps, 0.05)}),
    "torch's optimizer": (
        {"optimizer": torch.optim.Adagrad},
        {"make": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.05)},
    ),
}


@pytest.mark.parametrize("case", PLAIN)
def test_the_gradient_is_that_of_a_plain_loop(case):
    """Of the last step, before it is clipped."""
    graph, norms = tiny_graph(), []
    settings, plain = PLAIN[case]

    def loss(output, y, rows):
        value = cross_entropy(output, y, rows)
        if torch.is_grad_enabled():
            parts = torch.autograd.grad(value, list(nets[-1].parameters()), retain_graph=True)
            norms.append(float(torch.cat([part.flatten() for part in parts]).norm()))
        return value

    nets, make = [], plain.get("make", lambda model: torch.optim.Adam(model.parameters(), lr=0.05))
    train_plainly(graph, loss=loss, **{**plain, "make": lambda model: (nets.append(model), make(model))[1]})
    task = weft.Task(graph=graph, model=Net, lr=0.05, epochs=EPOCHS, callbacks=NORM, **settings)
    logged = weft.run(task, **QUICK).logged["norm"]
    assert [epoch for epoch, _ in logged] == list(range(1, EPOCHS + 1))
    assert [value for _, value in logged] == pytest.approx(norms, rel=1e-4)


@pytest.mark.parametrize("sampled", [{}, {"mode": "sampled", "fanout": [3, 3], "batch": 4}])
def test_members_of_a_stack_have_their_own(sampled):
    """Padded widths included; of several steps of an epoch it is the last one's."""
    sweep = make_sweep(hidden=[4, 8], seed=[0, 1], dropout=0.5, callbacks=NORM, epochs=5, **sampled)
    together = weft.run(sweep, **QUICK)
    assert together.plan[0].join == "stacked"
    for task in sweep:
        alone = weft.run(task, **QUICK).logged["norm"]
        for mine, true in zip(together[task.label].logged["norm"], alone, strict=True):
            assert mine == pytest.approx(true, rel=1e-4)


def log_some(context):
    if context.epoch == 4:
        context.log(half=torch.tensor(0.5), none=math.nan)
    context.log(epochs=context.epoch)


def test_logged_numbers_are_events_and_part_of_the_result(tmp_path):
    events = []
    sweep = make_sweep(seed=[0, 1], epochs=6, callbacks=[weft.Callback(log_some, every=2)])
    result = weft.run(sweep, out=tmp_path, on_event=events.append, **QUICK)
    logs = [(event.task, event.data["epoch"], event.data["values"]) for event in of_kind(events, "log")]
    for member in (*result, *weft.read(tmp_path)):
        assert member.logged["epochs"] == [(2, 2.0), (4, 4.0), (6, 6.0)]
        assert member.logged["half"] == [(4, 0.5)]
        assert math.isnan(member.logged["none"][0][1])
        assert [epoch for name, epoch, _ in logs if name == member.name] == [2, 4, 6]
        assert (member.name, 2, {"epochs": 2.0}) in logs
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["values"]["none"] for line in lines if line["event"] == "log" and line["epoch"] == 4] == [None, None]
    task = weft.run(sweep.tasks()[0], **QUICK)
    assert task.logged["epochs"] == [(2, 2.0), (4, 4.0), (6, 6.0)]


def test_a_resumed_run_logs_no_epoch_twice(tmp_path):
    sweep = make_sweep(seed=[0, 1], epochs=20, dropout=0.5, callbacks=[weft.Callback(log_norm, every=1)])
    whole, events = weft.run(sweep, **QUICK), []

    def kill(event):
        events.append(event)
        if event.kind == "log" and event.data["epoch"] == 11:
            raise Killed

    options = weft.RunOptions(checkpoint_every=0.0)
    with pytest.raises(Killed):
        weft.run(sweep, out=tmp_path, on_event=kill, options=options, **QUICK)
    resumed = weft.run(sweep, out=tmp_path, resume=True, on_event=events.append, **QUICK)
    for member, other in zip(resumed, whole, strict=True):
        assert member.logged == other.logged
        received = [event for event in of_kind(events, "log") if event.task == member.name]
        assert [(event.data["epoch"], event.data["values"]["norm"]) for event in received] == other.logged["norm"]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"size": "large"}, r"log\(size='large'\): must be a number"),
        ({"size": torch.zeros(2)}, r"log\(size=tensor\(\[0., 0.\]\)\): must be a number"),
        ({"val_loss": 1.0}, "val_loss is a column of the history; choose another name"),
    ],
)
def test_what_is_refused(values, sentence):
    task = make_sweep(callbacks=[weft.Callback(lambda context: context.log(**values), at=[1])]).tasks()[0]
    with pytest.raises(weft.InputError, match=sentence):
        weft.run(task, **QUICK)
