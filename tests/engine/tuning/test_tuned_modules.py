"""Tuned runs of users' modules: a trial in a row that another has left has the numbers that it has alone."""

from __future__ import annotations

import random
import signal
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("torch_geometric")
from torch_geometric.nn import GAT, GCN, GCNConv, GraphSAGE

import weft
from tests.engine.tuning.test_tuned import check_alone, same
from tests.engine.tuning.test_tuned_resume import check_same, kill_after, preempt_after
from tests.engine.tuning.tuners import Listed, drawn, tuned
from tests.graphs_for_tests import tiny_graph
from weft.runtime.group import GroupRun

SPACE = {"lr": weft.loguniform(1e-3, 5e-2), "seed": weft.uniform(0, 1000), "epochs": [4, 7]}
COUNTS = {"calls": 0}


class Net(nn.Module):
    """Has buffers, and dropout of both kinds."""

    def __init__(self, in_channels, hidden, out_channels, rate=0.5):
        super().__init__()
        # Without a bias before the norm: its gradient would be nothing but rounding, of which Adam makes whole steps.
        self.first, self.last = GCNConv(in_channels, hidden, bias=False), GCNConv(hidden, out_channels)
        self.norm, self.drop, self.rate = nn.BatchNorm1d(hidden), nn.Dropout(0.3), rate

    def hidden(self, x, edge_index):
        return F.relu(self.norm(self.first(x, edge_index)))

    def forward(self, x, edge_index):
        h = F.dropout(self.drop(self.hidden(x, edge_index)), self.rate, self.training)
        return self.last(h, edge_index)


class Noisy(Net):
    """Draws from torch's generator, so that several do not run at once."""

    def hidden(self, x, edge_index):
        h = super().hidden(x, edge_index)
        return h + 0.1 * torch.randn(h.shape, device=h.device) if self.training else h


class Remembers(Net):
    """Keeps a number from call to call that is no buffer."""

    mean = 0.0

    def hidden(self, x, edge_index):
        h = super().hidden(x, edge_index)
        if self.training:
            self.mean = 0.5 * self.mean + float(h.detach().mean())
        return h - self.mean


class Latches(Net):
    """Keeps something from a later step on, which no call before the first epoch shows."""

    steps = 3

    def __init__(self, in_channels, hidden, out_channels):
        super().__init__(in_channels, hidden, out_channels)
        self.register_buffer("seen", torch.zeros(()))
        self.late = False

    def hidden(self, x, edge_index):
        if self.training:
            self.seen += 1
        if int(self.seen) > self.steps:
            self.late = True
        return super().hidden(x, edge_index) * (0.5 if self.late else 1.0)


class Masked(Net):
    """Draws an attribute in its constructor that is neither a parameter nor a buffer."""

    def __init__(self, in_channels, hidden, out_channels):
        super().__init__(in_channels, hidden, out_channels)
        self.mask = torch.rand(hidden)

    def hidden(self, x, edge_index):
        return super().hidden(x, edge_index) * self.mask.to(x.device)


class Frozen(Net):
    """Has a random parameter that does not train."""

    def __init__(self, in_channels, hidden, out_channels):
        super().__init__(in_channels, hidden, out_channels)
        self.scale = nn.Parameter(torch.rand(hidden), requires_grad=False)

    def hidden(self, x, edge_index):
        return super().hidden(x, edge_index) * self.scale


class Random(Net):
    """Draws from Python's generator."""

    def hidden(self, x, edge_index):
        return super().hidden(x, edge_index) * (random.random() if self.training else 0.5)


class Counts(Net):
    """Keeps what its numbers depend on in a global variable."""

    def hidden(self, x, edge_index):
        COUNTS["calls"] += 1
        return super().hidden(x, edge_index) / COUNTS["calls"]


class Box:
    """Holds a number; not plain data."""

    value = 0.0


class Boxed(Net):
    """Keeps a number in an object that no file can hold."""

    def __init__(self, in_channels, hidden, out_channels):
        super().__init__(in_channels, hidden, out_channels)
        self.box = Box()

    def hidden(self, x, edge_index):
        self.box.value += 1.0
        return super().hidden(x, edge_index) / self.box.value


def make(in_channels, out_channels, hidden):
    """A function that builds a module."""
    return Net(in_channels, hidden, out_channels, rate=0.2)


def trials(space, count=6, width=2, **options):
    """Trials of ``space`` and of ``SPACE``, in order."""
    whole = {**SPACE, "hidden": 8, **space}
    varying = {key: value for key, value in whole.items() if isinstance(value, list) or key in ("lr", "seed")}
    return tuned(tiny_graph(), drawn(count, space=varying), width, space=whole, **options)


PYG = {"layers": 2, "dropout": 0.5}
CASES = [
    {"model": GCN, **PYG},
    {"model": GCN, **PYG, "norm": "layer_norm", "convert": False},
    {"model": GraphSAGE, **PYG, "jk": "lstm"},
    {"model": GAT, **PYG, "heads": 2},
    {"model": GCN, **PYG, "hidden": [4, 8], "dropout": [0.0, 0.5]},
    {"model": [GCN, Net, "gcn"], "hidden": 8},
    {"model": Net, "weight_decay": [0.0, 1e-2], "optimizer": ["adam", "adamw"]},
    {"model": Net, "ema": 0.9, "schedule": "plateau", "plateau": {"patience": 1}},
    {"model": make},
    *({"model": model} for model in (Net, Noisy, Remembers, Latches, Masked, Frozen, Random)),
    {"model": Net, "optimizer": torch.optim.RMSprop},
    {"model": "gcn", "optimizer": torch.optim.SGD, "hidden": [4, 8]},
]


def named(case):
    """What a case is called."""
    return "-".join([getattr(case["model"], "__name__", str(case["model"])), *(key for key in case if key != "model")])


@pytest.mark.parametrize("case", CASES, ids=named)
def test_every_trial_has_the_numbers_that_it_has_alone(case):
    result = trials(case, width=4)
    assert result.statuses == {"finished": 6}
    for each in result:
        check_alone(each)


@pytest.mark.parametrize("model", [Net, Noisy, Remembers])
def test_one_row_takes_trials_one_after_another(model):
    for each in trials({"model": model}, count=3, width=1):
        check_alone(each)


@pytest.mark.parametrize("model", [Net, GCN, Noisy, Masked])
def test_trials_in_used_rows_equal_trials_in_fresh_rows_bit_for_bit(model):
    space = {"model": model, **(PYG if model is GCN else {})}
    settings = drawn(6, space=SPACE)
    through = tuned(tiny_graph(), settings, 3, space={**SPACE, "hidden": 8, **space})
    for begin in (0, 3):
        fresh = tuned(tiny_graph(), settings[begin : begin + 3], 3, space={**SPACE, "hidden": 8, **space})
        assert len(fresh.plan[0].stack_members) == len(through.plan[0].stack_members)
        for number, each in enumerate(fresh):
            assert same(each, through[begin + number])


def test_an_object_begins_every_trial_with_its_weights():
    module = Net(tiny_graph().num_features, 8, tiny_graph().num_classes)
    before = [parameter.clone() for parameter in module.parameters()]
    space = {"model": module, "lr": SPACE["lr"], "epochs": [4, 7]}
    for each in tuned(tiny_graph(), drawn(5, space={"lr": SPACE["lr"], "epochs": [4, 7]}), 2, space=space):
        check_alone(each)
    assert all(torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize("model", [Net, GCN, Noisy])
def test_a_copy_continues_where_its_parent_was(model):
    space = {**SPACE, "epochs": [6], "hidden": 8, "model": model, **(PYG if model is GCN else {})}
    settings = drawn(2, space={name: space[name] for name in SPACE})

    class Copies(Listed):
        copies = True

        def ask(self, n):
            if self.settings:
                return super().ask(n)
            begun = any(call[0] == "trial-002" for call in self.calls)
            ended = any(call[:2] == ("trial-001", "pruned") for call in self.calls)
            return [{**settings[0], "parent": "trial-000"}] if n and ended and not begun else []

    result = tuned(tiny_graph(), settings, 2, Copies(settings, stops={"trial-001": 2}), space)
    child, parent = result["trial-002"], result["trial-000"]
    assert (child.metrics["parent"], child.metrics["copied_at"]) == ("trial-000", 2)
    assert same(child, parent), "with the same numbers it has the same future, buffers and draws included"


def search(out, model, name="asha", width=3, **run):
    """A run of 8 trials of ``model``; a checkpoint after every decision."""
    space = weft.Sweep(tiny_graph(), model=model, hidden=8, lr=SPACE["lr"], seed=SPACE["seed"], epochs=9)
    options = weft.RunOptions(tuner=weft.Tuner.of(name, seed=1), trials=8, width=width, checkpoint_every=0)
    return weft.run(space, options=options, device="cpu", out=out, progress=False, **run)


@pytest.mark.parametrize(
    ("model", "name"), [(Net, "asha"), (Net, "pbt"), (Noisy, "pbt"), (Remembers, "asha"), (Masked, "asha")]
)
def test_a_preempted_run_goes_on_with_the_same_trials_and_numbers(model, name, tmp_path):
    width, control = 8 if name == "pbt" else 3, weft.Control()
    whole = search(tmp_path / "whole", model, name, width)
    assert any("parent" in each.metrics for each in whole) == (name == "pbt")
    left = search(tmp_path / "two", model, name, width, control=control, on_event=preempt_after(4, control))
    assert "preempted" in left.statuses
    check_same(whole, search(tmp_path / "two", model, name, width, resume=True))
    assert isinstance(whole.best().model, model)
    assert set(whole.best_settings().settings) == {"lr"}


@pytest.mark.rest
def test_a_killed_run_goes_on_with_the_same_trials_and_numbers(tmp_path):
    whole = search(tmp_path / "whole", Net)
    child = subprocess.run([sys.executable, "-m", __name__, tmp_path / "two", "3"], check=False)
    assert child.returncode == -signal.SIGKILL
    check_same(whole, search(tmp_path / "two", Net, resume=True))
    read = weft.read(tmp_path / "two", graph=tiny_graph(), model=Net)
    check_same(whole, read)


ASHA = {"tuner": "asha", "trials": 3}


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (
            {"model": Boxed},
            ASHA,
            "model Boxed does not go with a tuner: it keeps box between calls, which is not plain",
        ),
        ({"model": Counts}, {**ASHA, "width": 1}, "model Counts does not go with a tuner: it keeps "),
        ({"model": Counts}, {**ASHA, "width": 2}, "which all models of a run share"),
        ({"model": Remembers}, {"tuner": "pbt", "trials": 9}, "go with a tuner that copies trials: it keeps 'mean'"),
        ({"model": Masked}, {"tuner": "pbt", "trials": 9}, "that copies trials: their modules differ in 'mask'"),
        (
            {"model": Net, "optimizer": torch.optim.RMSprop},
            {"tuner": "pbt", "trials": 9},
            "model Net does not go with a tuner that copies trials: RMSprop of torch keeps numbers in Python",
        ),
        ({"optimizer": ["adam", torch.optim.SGD]}, ASHA, "optimizers of torch and Weft's own do not go together"),
        ({"model": GCN, "layers": 2, "dropout": weft.uniform(0, 0.5)}, ASHA, "dropout=uniform(0, 0.5) is given to GCN"),
        ({"model": GCN, "layers": [1, 2, 3]}, {**ASHA, "width": 2}, "the space has 3 structures"),
        ({"model": Net, "mode": "sampled"}, ASHA, "sampled batches do not go with a tuner"),
        ({"model": Net, "callbacks": weft.Callback(print, every=2)}, ASHA, "callbacks= do not go with a tuner"),
    ],
)
def test_what_is_refused_is_one_sentence_before_the_first_epoch(settings, options, message):
    events, sweep = [], weft.Sweep(tiny_graph(), **{"hidden": 8, "lr": SPACE["lr"], "epochs": 9, **settings})
    with pytest.raises(weft.SpecError) as error:
        weft.run(sweep, options=weft.RunOptions(**options), device="cpu", progress=False, on_event=events.append)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not any(event.kind in ("trial", "rows") for event in events)


def test_every_value_of_a_range_with_a_step_has_a_stack():
    space = {"model": GCN, **PYG, "hidden": weft.uniform(4, 12, step=4), "dropout": weft.uniform(0.0, 0.5, step=0.25)}
    sweep = weft.Sweep(tiny_graph(), lr=SPACE["lr"], epochs=3, **space)
    result = weft.run(sweep, options=weft.RunOptions(tuner="random", trials=12), device="cpu", progress=False)
    assert len(result.plan[0].stack_members) == 9
    assert {(each.task.hidden in (4, 8, 12), each.task.dropout in (0.0, 0.25, 0.5)) for each in result} == {
        (True, True)
    }
    assert result.statuses == {"finished": 12}


CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("model", [GCN, Net, Noisy, Remembers])
def test_a_step_that_is_prepared_once_serves_all_trials_in_place(model, width, device, monkeypatch):
    groups, prepare, places = [], GroupRun.prepare, set()

    def note(group):
        groups.append(group)
        prepare(group)

    def addresses(event):
        if event.kind == "rows":
            tensors = [tensor for stack in groups[-1].stacks for tensor in stack.state.tensors().values()]
            weights = [part for stack in groups[-1].stacks for part in stack.members.model.parameters()]
            places.add(tuple(tensor.data_ptr() for tensor in (*tensors, *(weights if width == 1 else ()))))

    monkeypatch.setattr(GroupRun, "prepare", note)
    space = {**SPACE, "model": model, "hidden": 8, "epochs": [10, 14], **(PYG if model is GCN else {})}
    settings = drawn(5, space={name: space[name] for name in SPACE})
    options, sweep = weft.RunOptions(tuner=Listed(settings), trials=5, width=width), weft.Sweep(tiny_graph(), **space)
    result = weft.run(sweep, options=options, device=device, progress=False, on_event=addresses)
    assert result.statuses == {"finished": 5}
    assert (len(groups), len(places)) == (1, 1) or model is Remembers
    if model in (GCN, Net) and device == "cuda":
        assert not any("eagerly" in why for why in result.plan[0].why), result.plan[0].why
    for each in result:
        alone = weft.run(each.task, device=device, progress=False)
        assert each.history["loss"] == pytest.approx(alone.history["loss"], rel=2e-3, abs=2e-4)


if __name__ == "__main__":
    from tests.engine.tuning import test_tuned_modules as cases  # as the run that goes on imports it

    search(sys.argv[1], cases.Net, on_event=kill_after(int(sys.argv[2])))
