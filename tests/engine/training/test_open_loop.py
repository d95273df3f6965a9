"""The open parts of the training loop from ``weft.run`` and from spec files: what runs, and what is refused and why."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.graphs_for_tests import tiny_graph
from tests.runtime.loop.plain_loop import Net
from tests.runtime.loop.test_plain_torch import focal, regression_graph, several_numbers, two, two_right

QUICK = {"device": "cpu", "progress": False}
FUNCTIONS = """
import torch

def focal(logits, y, rows):
    log_p = logits[rows].log_softmax(-1).gather(1, y[rows][:, None]).squeeze(1)
    return ((1 - log_p.exp()) ** 2 * -log_p).mean()

def right(logits, y, rows):
    return (logits[rows].argmax(-1) == y[rows]).float().mean()

def halve(epoch):
    return 0.5**epoch

def make(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

def watch(moment):
    if moment.epoch == 4:
        moment.stop("seen enough")
"""
SPEC = """
graph = "demo"
[model]
hidden = 8
[train]
epochs = 6
objective = "functions.py:focal"
metric = "functions.py:right"
schedule = "functions.py:halve"
optimizer = "functions.py:make"
lr = 0.5
clip_value = 0.1
accumulate = 2
ema = 0.9
callbacks = [{ call = "functions.py:watch", every = 2 }]
[train.param_groups]
"convs.0.*" = { weight_decay = 5e-4 }
"""


def quick(graph=None, **settings):
    return weft.Task(**{"graph": graph or tiny_graph(), "hidden": 8, "epochs": 6, **settings})


def test_a_spec_file_names_functions_beside_it(tmp_path):
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "spec.toml").write_text(SPEC)
    result = weft.run(weft.read(tmp_path / "spec.toml"), **QUICK)
    assert result.status == "stopped"
    assert result.message == "task 'spec': stopped after epoch 4 by a callback: seen enough"
    assert len(result.history["loss"]) == 4
    assert result.metrics["val_right"] == pytest.approx(max(result.history["val_right"]))
    assert any("make of torch updates the parameters of one task" in why for why in result.plan.why)


def test_tables_of_a_spec_file():
    text = {"graph": "demo", "train": {"schedule": "plateau", "plateau": {"patience": 2}, "class_weights": [1.0, 2.0]}}
    task = weft.core.spec_file.parse_spec(text)
    assert isinstance(task, weft.Task)
    assert task.plateau == {"patience": 2}
    assert task.class_weights == (1.0, 2.0)
    several = weft.Sweep(graph="demo", class_weights=[None, "balanced", [1, 2]], param_groups=[{}, {"a*": {"lr": 1}}])
    assert len(several) == 6
    assert weft.Sweep.from_dict(several.to_dict()).tasks() == several.tasks()


def test_a_callback_sees_the_history_and_changes_the_rate():
    seen = []

    def watch(moment):
        seen.append((moment.task, moment.epoch, moment["val_loss"], len(moment.history["loss"])))
        moment.scale_lr(0.0)

    graph = tiny_graph()
    called = [weft.Callback(watch, at=[3])]
    still = weft.run(quick(graph, callbacks=called, dropout=0.0), **QUICK)
    plain = weft.run(quick(graph, dropout=0.0), **QUICK)
    assert seen == [("gcn", 3, plain.history["val_loss"][2], 3)]
    assert still.history["val_loss"][:3] == plain.history["val_loss"][:3]
    assert still.history["val_loss"][3:] == [still.history["val_loss"][2]] * 3


def test_a_callback_stops_one_of_several():
    def stop(moment):
        if moment.task == "seed=1":
            moment.stop()

    result = weft.run(
        weft.Sweep(tiny_graph(), hidden=8, epochs=6, seed=[0, 1], callbacks=[weft.Callback(stop, 2)]), **QUICK
    )
    assert [len(one.history["loss"]) for one in result] == [6, 2]
    assert [one.status for one in result] == ["finished", "stopped"]


def test_resumed_in_a_folder_with_an_optimizer_of_torch(tmp_path):
    graph = tiny_graph()
    how = {"optimizer": torch.optim.NAdam, "lr": 0.05, "schedule": "plateau", "plateau": {"patience": 1}, "ema": 0.9}
    task = weft.Task(graph=graph, model=Net, epochs=40, **how)
    whole = weft.run(task, **QUICK)
    control = weft.Control()

    def leave(event):
        if event.kind == "progress" and event.data["epoch"] >= 1:
            control.preempt()

    part = weft.run(task, out=tmp_path / "run", on_event=leave, control=control, **QUICK)
    assert part.status == "preempted"
    again = weft.run(task, out=tmp_path / "run", resume=True, **QUICK)
    assert again.history == whole.history
    for name, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value)


def test_less_is_better_of_an_error():
    result = weft.run(weft.Sweep(regression_graph(), hidden=8, epochs=8, metric="mse", lr=[1e-5, 0.05]), **QUICK)
    assert result.metric == "val_mse"
    assert result.best().task.lr == 0.05
    assert [score.settings["lr"] for score in result.settings_table()] == [0.05, 1e-5]
    best = result.best()
    assert best.metrics["val_mse"] == pytest.approx(min(best.history["val_mse"]))


def test_a_random_objective_trains_alone():
    def noisy(logits, y, rows):
        return focal(logits + 0.1 * torch.randn_like(logits), y, rows)

    graph, notes = tiny_graph(), []
    sweep = weft.Sweep(graph, hidden=8, epochs=4, objective=noisy, seed=[0, 1])
    result = weft.run(sweep, on_event=lambda event: notes.append(event.data.get("message", "")), **QUICK)
    assert any("objective noisy draws random numbers" in note for note in notes)
    alone = [weft.run(one, **QUICK) for one in sweep.tasks()]
    assert [one.history["loss"] for one in result] == [one.history["loss"] for one in alone]


def stateful():
    calls = []

    def growing(logits, y, rows):
        calls.append(None)
        return focal(logits, y, rows) * len(calls)

    return growing


class LearnedScale(torch.nn.Module):
    """A loss with a weight."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, logits, y, rows):
        return focal(logits * self.scale, y, rows)


REFUSED = {
    "a closure that counts": ({"objective": stateful()}, "objective growing gives other numbers when called again"),
    "no number": ({"objective": lambda out, y, rows: out[rows]}, r"returned a tensor \[24, 3\]; expected one number"),
    "no gradient": (
        {"objective": lambda out, y, rows: focal(out, y, rows).detach()},
        "objective <lambda> returned a number that autograd cannot follow",
    ),
    "weights that nothing trains": (
        {"objective": LearnedScale()},
        r"objective LearnedScale has parameters of its own \(scale\), which no optimizer would train",
    ),
    "an error": ({"objective": lambda out, y, rows: 1 / 0}, "objective <lambda> raised ZeroDivision.*test_open_loop"),
    "a callback's error": ({"callbacks": [weft.Callback(lambda moment: 1 / 0, 1)]}, "callback <lambda> raised Zero"),
    "closure": ({"optimizer": torch.optim.LBFGS}, "LBFGS computes the loss several times"),
    "unread rate": ({"optimizer": lambda ps: torch.optim.SGD(ps, lr=1), "lr": 0.1}, "lr=0.1 would have no effect"),
    "unread betas": ({"optimizer": torch.optim.SGD, "betas": (0.1, 0.2)}, "SGD does not take betas"),
    "unread argument": ({"optimizer": torch.optim.SGD, "optimizer_args": {"alpha": 1}}, "SGD has no parameter 'alpha'"),
    "unread table": ({"optimizer_args": {"alpha": 1}}, "optimizer_args=.* would have no effect: adam"),
    "parameters left out": (
        {"optimizer": lambda model: torch.optim.SGD([model.convs[0].weight], lr=1.0)},
        "leaves out convs.0.bias, convs.1.weight, convs.1.bias",
    ),
    "no optimizer": ({"optimizer": lambda ps: 3}, "gave int; expected a torch.optim.Optimizer"),
    "no such parameter": ({"param_groups": {"conv1.*": {"lr": 1}}}, "is the group of no parameter of gcn; they are"),
    "no such group setting": ({"param_groups": {"*": {"momentum": 1}}}, "may set lr and weight_decay"),
    "weights": ({"class_weights": [1, 2]}, "2 numbers for 3 classes"),
    "weights of a function": ({"class_weights": [1, 2, 3], "objective": focal}, "class_weights.* would have no effect"),
    "numbers of classes": ({"objective": "mse"}, "objective='mse' does not suit graph .* one class per node"),
    "metric of classes": ({"metric": "mae"}, "metric='mae' does not suit graph"),
    "unread delta": ({"huber_delta": 2.0}, "huber_delta=2.0 would have no effect"),
    "unread plateau": ({"plateau": {"patience": 2}}, "set schedule='plateau'"),
    "plateau of nothing": ({"schedule": "plateau", "plateau": {"watch": "val_f1"}}, "plateau watches 'val_f1'"),
    "plateau's settings": ({"schedule": "plateau", "plateau": {"factor": 2}}, "factor=2 must be above 0 and below 1"),
    "two clips": ({"clip_norm": 1.0, "clip_value": 1.0}, "two ways to clip"),
    "no factor": ({"schedule": lambda epoch: -1}, r"schedule <lambda>\(0\) is -1; expected a factor"),
    "a schedule of nothing": ({"schedule": lambda: 1.0}, r"schedule <lambda> raised TypeError: <lambda>\(\) takes 0"),
    "a schedule that fails": ({"schedule": lambda epoch: 1 / epoch}, r"schedule <lambda> raised Zero.*test_open_loop"),
    "a plateau of torch": (
        {"schedule": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)},
        "gave ReduceLROnPlateau, not a scheduler that needs the epoch alone",
    ),
    "momentum by schedule": (
        {"schedule": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)},
        "changes more than the learning rate: momentum",
    ),
    "rates of its own beside groups": (
        {
            "schedule": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9, eta_min=1e-3),
            "param_groups": {"*bias": {"lr": 0.05}},
        },
        "does not multiply every rate by the same factor, and a group of parameters has lr=0.05",
    ),
    "rates of its own beside an optimizer's": (
        {
            "schedule": lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False),
            "optimizer": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr / 10, momentum=0.5),
            "lr": 0.01,
        },
        "does not multiply every rate by the same factor, and a group of parameters has lr=0.001",
    ),
    "a scheduler of something else": (
        {"schedule": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)},
        "int is not an Optimizer .*a function that makes a scheduler has a parameter called optimizer",
    ),
    "warm-up of a function": ({"schedule": lambda epoch: 1, "warmup": 2}, "warmup=2 would have no effect"),
    "when": ({"callbacks": [print]}, "callbacks has <built-in function print>"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_a_sentence(case):
    settings, message = REFUSED[case]
    with pytest.raises(weft.WeftError, match=message) as caught:
        weft.run(quick(**settings), **QUICK)
    assert "\n" not in str(caught.value)


def test_metric_names_that_would_be_turned_round():
    def my_loss(output, y, rows):
        return 0.0

    with pytest.raises(weft.SpecError, match="cannot be called 'my_loss'"):
        weft.run(quick(metric=my_loss), **QUICK)


def test_a_callback_says_when():
    with pytest.raises(weft.SpecError, match="say when"):
        weft.Callback(print)
    with pytest.raises(weft.SpecError, match="every=0 must be"):
        weft.Callback(print, every=0)
    assert weft.Callback(print, every=3, at=[4]).next_after(3) == 4
    assert weft.Callback(print, at=4).next_after(4) is None


def test_a_plan_says_what_runs_eagerly():
    plan = weft.plan(quick("demo", optimizer=torch.optim.RMSprop), machine="h200")
    (group,) = plan.groups
    assert not group.plan.replay
    assert any("RMSprop keeps numbers in Python" in why for why in group.plan.why)
    assert (
        weft.plan(quick("demo", clip_norm=1.0, ema=0.9, accumulate=2, objective=focal), machine="h200")
        .groups[0]
        .plan.replay
    )


def test_an_optimizer_keeps_its_own_defaults():
    """What a task leaves out is left to the optimizer: in a list of tasks, and after a file."""
    graph = tiny_graph()
    task = quick(graph, optimizer="torch.optim:RMSprop", dropout=0.0)
    plain = weft.run(quick(graph, optimizer=lambda ps: torch.optim.RMSprop(ps), dropout=0.0), **QUICK)
    assert weft.run([task], **QUICK)[0].history["loss"] == plain.history["loss"]
    again = weft.Task.from_dict({**task.to_dict(), "graph": graph})
    assert weft.run(again, **QUICK).history["loss"] == plain.history["loss"]
    assert "lr" not in again.given


def test_results_of_functions_are_loaded(tmp_path):
    task = quick("demo", objective=focal, optimizer=torch.optim.RMSprop, schedule=lambda epoch: 1.0, epochs=2)
    trained = weft.run(task, out=tmp_path / "run", **QUICK)
    loaded = weft.read(tmp_path / "run")
    assert torch.equal(loaded.predict(), trained.predict())
    with pytest.raises(weft.SpecError, match="was given as an object"):
        weft.run(loaded.task, **QUICK)


def test_numbers_are_predicted():
    graph = regression_graph()
    result = weft.run(quick(graph, epochs=2), **QUICK)
    assert result.metrics["objective"] == "mse"
    assert result.predict().shape == (graph.num_nodes, 1)
    error = (result.predict(nodes="val").squeeze(1) - graph.y[graph.val]).square().mean()
    assert float(error) == pytest.approx(result.metrics["val_loss"], rel=1e-4)


@pytest.mark.parametrize("how", [{}, {"mode": "sampled", "fanout": (3, 3), "batch": 8}])
def test_several_numbers_are_predicted(tmp_path, how):
    graph = several_numbers()
    result = weft.run(quick(graph, epochs=2, **how), out=tmp_path / "run", **QUICK)
    assert result.metrics["objective"] == "mse"
    assert result.predict().shape == (graph.num_nodes, 3)
    error = (result.predict(nodes="val") - graph.y[graph.val]).square().mean()
    assert float(error) == pytest.approx(result.metrics["val_loss"], rel=1e-4)
    again = weft.read(tmp_path / "run", graph=graph)
    assert torch.equal(again.predict(), result.predict())
    with pytest.raises(weft.SpecError, match="objective='mse' has no probabilities"):
        result.predict_proba()


class Wide(torch.nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.last = torch.nn.Linear(i, 7)

    def forward(self, x):
        return self.last(x)


@pytest.mark.parametrize(("settings", "words"), [
    ({"model": Wide}, r"returned shape \[60, 7\]; expected logits \[60, 3\]: .* one column per number to predict"),
    ({"objective": "multiclass"}, "which has 3 numbers to predict per node; use 'mse' or 'mae' or 'huber'"),
    ({"metric": "accuracy"}, "which has 3 numbers to predict per node; use mse, mae or r2"),
    ({"class_weights": (1.0, 2.0, 3.0)}, "class_weights are for multiclass objectives"),
])  # fmt: skip
def test_what_does_not_suit_several_numbers(settings, words):
    with pytest.raises(weft.SpecError, match=words):
        weft.run(weft.Task(graph=several_numbers(), epochs=2, **settings), **QUICK)


def test_an_auxiliary_loss_is_no_part_of_a_prediction():
    graph = tiny_graph()
    result = weft.run(weft.Task(graph=graph, model=Net, epochs=2, model_args={"extra": True}), **QUICK)
    assert result.predict().shape == (graph.num_nodes,)


def test_balanced_weights_of_every_split():
    """Members of one stack on different splits: each has the weights of its own training nodes."""
    graph = tiny_graph().random_splits(2, train=20, val=10)
    sweep = weft.Sweep(graph, hidden=8, epochs=3, class_weights="balanced", splits="all", dropout=0.0)
    together = weft.run(sweep, **QUICK)
    for number, member in enumerate(together):
        alone = weft.run(quick(graph.split(number), epochs=3, class_weights="balanced", dropout=0.0), **QUICK)
        assert member.history["loss"] == pytest.approx(alone.history["loss"], rel=1e-5)
        assert member.history["val_loss"] == pytest.approx(alone.history["val_loss"], rel=1e-5)


def test_layers_of_pyg_are_converted_whatever_the_model_returns():
    pyg = pytest.importorskip("torch_geometric.nn")

    class Several(torch.nn.Module):
        def __init__(self, in_features, out_features):
            super().__init__()
            self.first, self.second = pyg.GCNConv(in_features, 8), pyg.GCNConv(8, out_features)

        def forward(self, x, edge_index):
            hidden = self.first(x, edge_index).relu()
            return {"logits": self.second(hidden, edge_index), "hidden": hidden}

    graph = tiny_graph(sparse=True)
    task = weft.Task(graph=graph, model=Several, epochs=4, objective=two, metric=two_right)
    converted, kept = weft.run(task, **QUICK), weft.run(task.with_values(convert=False), **QUICK)
    assert converted.history["loss"] == pytest.approx(kept.history["loss"], rel=1e-4)


def test_nan_before_any_update_is_not_blamed_on_the_rate():
    def undefined(out, y, rows):
        return out.sum() * float("nan")

    class Divides(Net):
        def forward(self, x):
            logits = super().forward(x)
            return logits / (logits - logits)

    with pytest.raises(weft.DivergedError, match=r"look at objective undefined: no weight had been updated yet"):
        weft.run(quick(objective=undefined), **QUICK)
    with pytest.raises(weft.DivergedError, match=r"look at what model Divides computes: no weight had been updated"):
        weft.run(weft.Task(graph=tiny_graph(), model=Divides, epochs=3), **QUICK)


def test_nan_after_updates_may_be_the_fault_of_the_rate_or_of_the_function():
    with pytest.raises(weft.DivergedError, match=r"look at objective focal, or try a lower lr than 1e\+30"):
        weft.run(quick(objective=focal, optimizer="sgd", lr=1e30), **QUICK)


def test_a_penalty_on_the_object_that_was_given_is_refused():
    graph = tiny_graph()
    net = Net(graph.num_features, graph.num_classes)
    free = torch.nn.Parameter(torch.ones(()))
    teacher = Net(graph.num_features, graph.num_classes)

    def penalised(logits, y, rows):
        return focal(logits, y, rows) + 0.1 * sum(one.square().sum() for one in net.parameters())

    def distilled(logits, y, rows):
        with torch.no_grad():
            wanted = teacher(graph.x).softmax(-1)
        return focal(logits, y, rows) + (logits.softmax(-1) - wanted).square().sum()

    for loss in (penalised, lambda logits, y, rows: focal(logits * free, y, rows)):
        with pytest.raises(weft.SpecError, match="reads weights other than through what the model returns"):
            weft.run(weft.Task(graph=graph, model=net, epochs=2, objective=loss), **QUICK)
    assert weft.run(weft.Task(graph=graph, model=net, epochs=2, objective=distilled), **QUICK).status == "finished"


def test_a_loss_with_frozen_weights_is_a_function():
    loss = LearnedScale().requires_grad_(False)
    assert weft.run(quick(objective=loss), **QUICK).history == weft.run(quick(objective=focal), **QUICK).history


def test_a_callback_reads_the_model_of_its_epoch_and_cannot_change_the_training():
    graph, seen = weft.load("demo"), []

    def watch(context):
        with torch.no_grad():
            logits = context.model(graph.x, graph.adj)
            right = (logits[graph.val].argmax(1) == graph.y[graph.val]).float().mean().item()
            seen.append((right, context["val_accuracy"]))
            for parameter in context.model.parameters():
                parameter.zero_()

    settings = {"graph": graph, "hidden": 8, "epochs": 6, "seed": [0, 1]}
    watched = weft.run(weft.Sweep(**settings, callbacks=[weft.Callback(watch, every=2)]), device="cpu", progress=False)
    plain = weft.run(weft.Sweep(**settings), device="cpu", progress=False)
    assert len(seen) == 6  # of two members; after the last epoch, too
    for right, recorded in seen:
        assert right == pytest.approx(recorded, abs=1e-6)
    assert [member.history["loss"] for member in watched] == [member.history["loss"] for member in plain]
