"""Every part of the training loop trains what a plain loop of torch trains: same losses, same weights."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from tests.graphs_for_tests import tiny_graph
from tests.runtime.loop.plain_loop import EPOCHS, Net, train_plainly
from tests.stacks import start
from weft.core.settings import Callback
from weft.core.task import Task
from weft.graph import Graph
from weft.runtime.step.evaluation import METRICS

LR = {"lr": 0.05}


def focal(logits, y, rows):
    """A loss that Weft does not know."""
    log_p = logits[rows].log_softmax(-1)
    right = log_p.gather(1, y[rows][:, None]).squeeze(1)
    return ((1 - right.exp()) ** 2 * -right).mean()


def decayed(epoch):
    return 0.9**epoch


def by_group(model):
    return torch.optim.AdamW(
        [{"params": model.first.parameters(), "weight_decay": 0.1}, {"params": model.second.parameters(), "lr": 0.01}],
        lr=0.05,
        weight_decay=0.0,
    )


def sgd_by_group(model):
    groups = [
        {"params": model.first.parameters(), "weight_decay": 0.1},
        {"params": model.second.parameters(), "lr": 0.01},
    ]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.05)


def steep(logits, y, rows):
    """A loss so large that rates near torch's least change of a rate still train."""
    return 1e7 * F.cross_entropy(logits[rows], y[rows])


def of_plateau(**settings):
    return lambda optimizer: ReduceLROnPlateau(optimizer, **settings).step


def of_lambda(optimizer):
    schedule = LambdaLR(optimizer, decayed)
    return lambda _: schedule.step()


def of_steps(optimizer):
    schedule = StepLR(optimizer, 3, 0.3)
    return lambda _: schedule.step()


def halved_at_five(epoch, optimizer):
    if epoch == 5:
        optimizer.param_groups[0]["lr"] *= 0.5


WEIGHTS = (1.0, 0.5, 3.0)
PAUSES = {"patience": 0, "factor": 0.5, "threshold": 0.2, "cooldown": 2, "min_lr": 0.02}
GROUPS = {"first.*": {"weight_decay": 0.1}, "second.*": {"lr": 0.01}}


def weighted(smoothing=0.0):
    weight = torch.tensor(WEIGHTS)
    return lambda out, y, rows: F.cross_entropy(out[rows], y[rows], weight, label_smoothing=smoothing)


def make(kind, **settings):
    return lambda model: kind(model.parameters(), **settings)


CASES = {
    "objective": ({"objective": focal}, {"loss": focal}),
    "class weights": ({"class_weights": WEIGHTS}, {"loss": weighted()}),
    "class weights, smoothed": ({"class_weights": WEIGHTS, "label_smoothing": 0.2}, {"loss": weighted(0.2)}),
    "auxiliary loss": ({"model_args": {"extra": True}}, {"extra": True}),
    "optimizer": (
        {"optimizer": torch.optim.RMSprop, "optimizer_args": {"alpha": 0.9}},
        {"make": make(torch.optim.RMSprop, lr=0.05, alpha=0.9)},
    ),
    "state from the start": ({"optimizer": torch.optim.Adagrad}, {"make": make(torch.optim.Adagrad, lr=0.05)}),
    "optimizer by name": ({"optimizer": "torch.optim:NAdam"}, {"make": make(torch.optim.NAdam, lr=0.05)}),
    "groups": ({"optimizer": "adamw", "param_groups": GROUPS}, {"make": by_group}),
    "groups of sgd": (
        {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.05, "param_groups": GROUPS},
        {"make": sgd_by_group},
    ),
    "groups of torch": (
        {"optimizer": torch.optim.AdamW, "weight_decay": 0.0, "param_groups": GROUPS},
        {"make": by_group},
    ),
    "clip norm": ({"clip_norm": 0.05}, {"clip": lambda ps: clip_grad_norm_(ps, 0.05)}),
    "clip norm above every gradient": (
        {"clip_norm": 1e3, "optimizer": "sgd", "lr": 0.5},
        {"clip": lambda ps: clip_grad_norm_(ps, 1e3), "make": make(torch.optim.SGD, lr=0.5)},
    ),
    "clip value": (
        {"clip_value": 0.002, "optimizer": "sgd"},
        {"clip": lambda ps: clip_grad_value_(ps, 0.002), "make": make(torch.optim.SGD, lr=0.05)},
    ),
    "accumulation": (
        {"accumulate": 3, "clip_norm": 0.1},
        {"accumulate": 3, "clip": lambda ps: clip_grad_norm_(ps, 0.1)},
    ),
    "averaging": ({"ema": 0.8}, {"ema": 0.8}),
    "averaging and accumulation": ({"ema": 0.8, "accumulate": 2}, {"ema": 0.8, "accumulate": 2}),
    "schedule": ({"schedule": decayed}, {"schedule": of_lambda}),
    "schedule of torch": (
        {"schedule": lambda optimizer: StepLR(optimizer, 3, 0.3)},
        {"schedule": of_steps},
    ),
    "plateau": (
        {"schedule": "plateau", "plateau": {"patience": 0, "factor": 0.3, "threshold": 0.05}},
        {"schedule": of_plateau(patience=0, factor=0.3, threshold=0.05)},
    ),
    "plateau with pauses": (
        {"schedule": "plateau", "plateau": PAUSES},
        {"schedule": of_plateau(**PAUSES)},
    ),
    "plateau that would change the rate by less than torch's least": (
        {
            "objective": steep,
            "optimizer": "sgd",
            "lr": 1.5e-8,
            "schedule": "plateau",
            "plateau": {"patience": 0, "factor": 0.5, "threshold": 0.5},
        },
        {
            "loss": steep,
            "make": make(torch.optim.SGD, lr=1.5e-8),
            "schedule": of_plateau(patience=0, factor=0.5, threshold=0.5),
        },
    ),
    "everything of torch": (
        {
            "optimizer": torch.optim.AdamW,
            "param_groups": GROUPS,
            "weight_decay": 0.0,
            "objective": focal,
            "clip_norm": 0.05,
            "accumulate": 2,
            "ema": 0.9,
            "schedule": "plateau",
            "plateau": {"patience": 0, "factor": 0.5, "threshold": 0.05},
        },
        {
            "make": by_group,
            "loss": focal,
            "clip": lambda ps: clip_grad_norm_(ps, 0.05),
            "accumulate": 2,
            "ema": 0.9,
            "schedule": of_plateau(patience=0, factor=0.5, threshold=0.05),
        },
    ),
}


def by_model(model, lr):
    """An optimizer that is made of the whole model."""
    groups = [{"params": [model.second.weight, model.second.bias]}, {"params": model.first.parameters(), "lr": 0.5}]
    return torch.optim.SGD(groups, lr=lr, momentum=0.9)


CASES["optimizer of the model"] = ({"optimizer": by_model}, {"make": lambda model: by_model(model, 0.05)})


def trained(graph, **settings):
    """The group of one task after its epochs, its rows of history by column, and its weights by name."""
    task = Task(graph=graph, model=Net, epochs=EPOCHS, **{**LR, **settings})
    group = start([task], graph)
    (update,) = group.advance(EPOCHS)
    (stack,) = group.stacks
    history = dict(zip(stack.columns, zip(*update.rows, strict=True), strict=True))
    return group, history, stack.members.layout.named(stack.state.evaluated[0])


@pytest.mark.parametrize("case", CASES)
def test_equal_to_a_plain_loop(case):
    settings, plain = CASES[case]
    graph = tiny_graph()
    losses, checked, weights = train_plainly(graph, **plain)
    _, history, mine = trained(graph, **settings)
    assert max(abs(a - b) for a, b in zip(checked, train_plainly(graph)[1], strict=True)) > 1e-3  # it does something
    torch.testing.assert_close(torch.tensor(history["loss"]), torch.tensor(losses), rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(torch.tensor(history["val_loss"]), torch.tensor(checked), rtol=2e-5, atol=2e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(mine[name], weight, rtol=1e-4, atol=5e-6)


def regression_graph() -> Graph:
    graph = tiny_graph()
    y = graph.x @ torch.linspace(-1, 1, graph.num_features) + 0.5
    splits = {"train": graph.train, "val": graph.val, "test": graph.test}
    return Graph.from_edges(*graph.edge_index(), x=graph.x, y=y, name="numbers", **splits)


def several_numbers() -> Graph:
    """Three numbers to predict per node."""
    graph = tiny_graph()
    y = graph.x @ torch.linspace(-1, 1, 3 * graph.num_features).view(-1, 3).roll(1, 1) + 0.5
    splits = {"train": graph.train, "val": graph.val, "test": graph.test}
    return Graph.from_edges(*graph.edge_index(), x=graph.x, y=y, name="numbers", **splits)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["mse", "mae", "huber"])
def test_regression_is_that_of_torch(name, count):
    graph = regression_graph() if count == 1 else several_numbers()
    assert (graph.regression, graph.num_classes) == (True, count)
    losses = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": lambda a, b: F.huber_loss(a, b, delta=0.3)}
    plain = train_plainly(graph, loss=lambda out, y, rows: losses[name](out[rows].view_as(y[rows]), y[rows]))
    settings = {"objective": name} | ({"huber_delta": 0.3} if name == "huber" else {})
    group, history, mine = trained(graph, **settings)
    assert group.stacks[0].metric == "r2"
    torch.testing.assert_close(torch.tensor(history["loss"]), torch.tensor(plain[0]), rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(torch.tensor(history["val_loss"]), torch.tensor(plain[1]), rtol=2e-5, atol=2e-6)
    for key, weight in plain[2].items():
        torch.testing.assert_close(mine[key], weight, rtol=1e-4, atol=5e-6)


def test_metrics_of_several_numbers():
    target = torch.tensor([[1.0, 5.0, 0.0], [2.0, 5.0, 2.0], [4.0, 5.0, 1.0]])
    output = target + torch.tensor([[0.5, 1.0, 0.0], [0.0, 0.0, -1.0], [0.0, 0.0, 0.0]])
    mse, mae, r2 = (METRICS[name] for name in ("mse", "mae", "r2"))
    assert float(mse(output, target)) == pytest.approx(float(F.mse_loss(output, target)))
    assert float(mae(output, target)) == pytest.approx(float(F.l1_loss(output, target)))
    first, last = 1 - 0.25 / ((target[:, 0] - 7 / 3).square().sum()), 1 - 1 / 2
    assert float(r2(output, target)) == pytest.approx(float(first + last) / 2)  # the second number never differs
    assert r2(output[None, :, 1:2], target[:, 1:2]).isnan().all()
    assert r2(torch.stack([output, target]), target).shape == (2,)


def test_metrics_of_numbers():
    graph = regression_graph()
    group, history, _ = trained(graph, metric="mse", objective="mse")
    assert history["val_mse"] == pytest.approx(history["val_loss"], rel=1e-5)
    best = min(range(EPOCHS), key=lambda epoch: history["val_mse"][epoch])
    assert group.poll(0)[0].best_epoch == best  # less is better
    model = group.best_model(0)
    with torch.no_grad():
        found = model(graph.x).squeeze(-1)[graph.val]
    error = (found - graph.y[graph.val]).square()
    assert float(error.mean()) == pytest.approx(history["val_mse"][best], rel=1e-4)
    spread = (graph.y[graph.val] - graph.y[graph.val].mean()).square()
    _, other, _ = trained(graph, objective="mse")
    assert other["val_r2"][best] == pytest.approx(1 - float(error.sum() / spread.sum()), rel=1e-4)


def test_a_metric_of_ones_own():
    graph = tiny_graph()

    def wrong(output, y, rows):
        return -float((output[rows].argmax(-1) != y[rows]).float().mean())

    group, history, _ = trained(graph, metric=wrong)
    plain = trained(graph)[1]
    assert [1 + one for one in history["val_wrong"]] == pytest.approx(plain["val_accuracy"])
    assert group.poll(0)[0].best_epoch == trained(graph)[0].poll(0)[0].best_epoch


class Two(Net):
    """It returns a dict, which only a user's own objective and metric read."""

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        return {"logits": self.second(hidden), "hidden": hidden}


def two(output, y, rows):
    return F.cross_entropy(output["logits"][rows], y[rows]) + 0.1 * output["hidden"].square().mean()


def two_right(output, y, rows):
    return (output["logits"][rows].argmax(-1) == y[rows]).float().mean()


def test_whatever_a_model_returns():
    graph = tiny_graph()
    losses, _, weights = train_plainly(graph, extra=True)
    task = Task(graph=graph, model=Two, epochs=EPOCHS, objective=two, metric=two_right, **LR)
    group = start([task], graph)
    (update,) = group.advance(EPOCHS)
    assert [row[0] for row in update.rows] == pytest.approx(losses, rel=2e-5)
    mine = group.stacks[0].members.layout.named(group.stacks[0].state.flat[0])
    for name, weight in weights.items():
        torch.testing.assert_close(mine[name], weight, rtol=1e-4, atol=5e-6)


def test_scaled_rates_are_a_changed_lr():
    """What a callback asks for: from the next step on, at another rate."""
    graph = tiny_graph()
    plain = train_plainly(graph, make=make(torch.optim.SGD, lr=0.05), after=halved_at_five)
    called = (Callback(lambda moment: None, at=(5,)),)
    for optimizer in ("sgd", torch.optim.SGD):
        task = Task(graph=graph, model=Net, epochs=EPOCHS, callbacks=called, optimizer=optimizer, **LR)
        group = start([task], graph)
        group.advance(5)
        group.scale_rates({0: 0.5})
        group.advance(EPOCHS)
        assert [row[0] for row in group.poll(0)[0].rows] == pytest.approx(plain[0], rel=2e-5)
