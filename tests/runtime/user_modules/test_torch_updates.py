"""Modules that only torch's own optimizers update right: exact alone, in a sweep and resumed, or refused at once.

Parameters with a gradient in some steps alone, sparse gradients, parameters of other types than float32.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import weft
from tests.runtime.user_modules.odd_modules import Base
from tests.runtime.user_modules.test_exact import EPOCHS, GRAPH, RATE, preempted_after, run, seed_all, tasks_of


class Alternating(Base):
    """Its first layer has a gradient in every second step."""

    def forward(self, x, adj):
        if self.training:
            self.calls = getattr(self, "calls", 0) + 1
        h = self.hidden(x, adj)
        return self.last(h if getattr(self, "calls", 0) % 2 else h.detach())


class Freezing(Base):
    """Its first layer is frozen from the fourth step on."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.calls = 0

    def forward(self, x, adj):
        self.calls += self.training
        if self.calls == 4:
            self.conv.requires_grad_(False)
        return super().forward(x, adj)


class Detaching(Freezing):
    """The same by a detached activation, which also works where weights are copies."""

    def forward(self, x, adj):
        self.calls += self.training
        h = self.hidden(x, adj)
        return self.last(h if self.calls < 4 else h.detach())


class Experts(nn.Module):
    """One of three experts answers in turn."""

    def __init__(self, i, o):
        super().__init__()
        self.experts, self.calls = nn.ModuleList(nn.Linear(i, o) for _ in range(3)), 0

    def forward(self, x, adj):
        self.calls += self.training
        return self.experts[self.calls % 3](x)


class Routed(nn.Module):
    """Each node goes to the expert that its gate likes best; nobody may go to one of them."""

    def __init__(self, i, o):
        super().__init__()
        self.gate, self.experts = nn.Linear(i, 4), nn.ModuleList(nn.Linear(i, o) for _ in range(4))

    def forward(self, x, adj):
        shares = self.gate(4 * x).softmax(-1)
        best, out = shares.argmax(-1), x.new_zeros(x.shape[0], 3)
        for number, expert in enumerate(self.experts):
            mine = (best == number).nonzero().squeeze(-1)
            if len(mine) and (number < 2 or int(mine.sum()) % 2):
                out = out.index_add(0, mine, shares[mine, number, None] * expert(x[mine]))
        return out


class Gpr(nn.Module):
    """GPRGNN as published: the coefficients of its hops are made by NumPy, in float64."""

    def __init__(self, i, o):
        super().__init__()
        self.first, self.last = nn.Linear(i, 8), nn.Linear(8, o)
        self.temp = nn.Parameter(torch.tensor(0.1 * (0.9 ** np.arange(4))))

    def forward(self, x, edge_index):
        h = self.last(torch.relu(self.first(x)))
        out = h * self.temp[0]
        for hop in range(1, 4):
            h = torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]]) * 0.2
            out = out + self.temp[hop] * h
        return out


class GprOfVectors(Gpr):
    """Coefficients that are no scalars make its logits float64."""

    def forward(self, x, edge_index):
        hops = [self.last(torch.relu(self.first(x)))]
        for _ in range(1, 4):
            hops.append(torch.zeros_like(hops[0]).index_add(0, edge_index[1], hops[-1][edge_index[0]]) * 0.2)
        return (torch.stack(hops) * self.temp[:, None, None]).sum(0)


class Clamping(Gpr):
    """It writes to weights of both types."""

    def forward(self, x, edge_index):
        self.temp.data.clamp_(0.08, 0.095)
        self.last.weight.data.clamp_(-0.2, 0.2)
        return super().forward(x, edge_index)


class Halves(Base):
    """A parameter in half precision."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))

    def forward(self, x, adj):
        return self.last(self.hidden(x, adj) * self.scale)


class Table(Base):
    """An embedding with sparse gradients."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.table = nn.Embedding(GRAPH.num_nodes, o, sparse=True)

    def forward(self, x, adj):
        return super().forward(x, adj) + self.table(torch.arange(0, x.shape[0] - 4).clamp(max=20).repeat(2)[: len(x)])


SOMETIMES = [Alternating, Freezing, Detaching, Experts, Routed]
OTHER_TYPES = [Gpr, GprOfVectors, Clamping, Halves]
LOOPS = [
    {"optimizer": "adam", "weight_decay": 0.05},
    {"optimizer": "adamw", "weight_decay": 0.05, "betas": (0.8, 0.99)},
    {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.05},
    {"optimizer": "adam", "accumulate": 3},
    {"optimizer": "adam", "clip_norm": 0.05, "schedule": "cosine"},
    {"optimizer": "adam", "param_groups": {"*bias": {"lr": 0.1, "weight_decay": 0.0}}, "weight_decay": 0.1},
    {"optimizer": torch.optim.Adam, "accumulate": 3},
]
TORCHS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}


def plain(model, seed=0, optimizer="adam", accumulate=1, clip_norm=None, schedule=None, param_groups=None, **numbers):
    """The loop that a user would write."""
    seed_all(seed)
    module, losses = model(6, 3), []
    biases = {"params": [p for n, p in module.named_parameters() if param_groups and n.endswith("bias")]}
    rest = {"params": [p for n, p in module.named_parameters() if not (param_groups and n.endswith("bias"))]}
    groups = [rest, biases | param_groups["*bias"]] if param_groups else [rest]
    update = TORCHS.get(optimizer, optimizer)(groups, lr=RATE, **numbers)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(update, EPOCHS) if schedule else None
    edges = GRAPH.edge_index() if issubclass(model, Gpr) else GRAPH.adj
    for epoch in range(1, EPOCHS + 1):
        module.train()
        loss = F.cross_entropy(module(GRAPH.x, edges)[GRAPH.train], GRAPH.y[GRAPH.train])
        (loss / accumulate).backward()
        losses.append(loss.item())
        if epoch % accumulate == 0:
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
            update.step()
            update.zero_grad()
        if rates is not None:
            rates.step()
        module.eval()
        with torch.no_grad():
            module(GRAPH.x, edges)
    return losses, module


def assert_plain(result, model, seed=0, **settings):
    losses, module = plain(model, seed, **settings)
    assert result.history["loss"] == pytest.approx(losses, abs=2e-6, rel=0)
    if result.metrics["best_epoch"] == EPOCHS:
        for name, value in module.state_dict().items():
            torch.testing.assert_close(result.model.state_dict()[name], value, rtol=1e-5, atol=1e-6)
    assert {n: p.dtype for n, p in result.model.named_parameters()} == {
        n: p.dtype for n, p in module.named_parameters()
    }


@pytest.mark.parametrize("settings", LOOPS)
@pytest.mark.parametrize("model", [Alternating, Freezing, Experts, Gpr])
def test_every_loop_is_a_plain_loop(model, settings):
    assert_plain(run(tasks_of(model, [0], **settings)[0]), model, **settings)


@pytest.mark.parametrize("model", [*SOMETIMES, *OTHER_TYPES])
def test_alone_and_in_a_sweep_is_a_plain_loop(model):
    if model is not Halves:  # the update of a parameter in half precision is rounded in another order
        assert_plain(run(tasks_of(model, [1])[0]), model, 1)
    together = run(tasks_of(model, range(3)))
    for seed, one in enumerate(together):
        assert_plain(one, model, seed)
        assert one.history["loss"] == run(tasks_of(model, [seed])[0]).history["loss"]


@pytest.mark.parametrize("epochs", [2, 5, 7])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("model", [Alternating, Freezing, Experts, Gpr, Clamping])
def test_resumed_is_uninterrupted(model, accumulate, epochs, tmp_path, monkeypatch):
    (task,) = tasks_of(model, [0], weight_decay=0.05, accumulate=accumulate)
    preempted_after(epochs, task, tmp_path / "out", monkeypatch)
    resumed = run(task, out=tmp_path / "out", resume=True)
    assert resumed.history["loss"] == run(task).history["loss"]
    assert_plain(resumed, model, weight_decay=0.05, accumulate=accumulate)


def test_a_layer_that_freezes_after_an_extension(tmp_path):
    (task,) = tasks_of(Freezing, [0])
    assert run(task.with_values(epochs=3), out=tmp_path / "run").status == "finished"
    assert_plain(run(task, out=tmp_path / "run", extend=True), Freezing)


def test_a_layer_that_has_no_gradient_later_in_bf16():
    mine = run(tasks_of(Detaching, [0], precision="bf16", weight_decay=0.5)[0])
    stopped = run(tasks_of(Detaching, [0], precision="bf16", weight_decay=0.5, epochs=4)[0])
    assert mine.status == "finished"
    assert torch.equal(mine.model.conv.weight, stopped.model.conv.weight) or mine.metrics["best_epoch"] <= 3


def test_averaged_weights_of_several_types():
    settings = {"ema": 0.7, "epochs": 2, "eval_every": 2}
    averaged = run(tasks_of(Gpr, [0], **settings)[0]).model
    first, second = (run(tasks_of(Gpr, [0], epochs=n, eval_every=n)[0]).model.state_dict() for n in (1, 2))
    for name, value in averaged.state_dict().items():
        torch.testing.assert_close(value, torch.lerp(first[name], second[name], 0.3), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["sgd", torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_gradients_train_as_in_a_plain_loop(optimizer, tmp_path, monkeypatch):
    tasks = tasks_of(Table, range(2), optimizer=optimizer)
    for seed, one in enumerate(run(tasks)):
        assert_plain(one, Table, seed, optimizer=optimizer)
    preempted_after(5, tasks[0], tmp_path / "out", monkeypatch)
    assert_plain(run(tasks[0], out=tmp_path / "out", resume=True), Table, optimizer=optimizer)


class TableAlone(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.table = nn.Embedding(GRAPH.num_nodes, o, sparse=True)

    def forward(self, x, adj):
        return self.table(torch.arange(x.shape[0]))


def test_sparse_adam():
    optimizer = torch.optim.SparseAdam
    assert_plain(run(tasks_of(TableAlone, [0], optimizer=optimizer)[0]), TableAlone, optimizer=optimizer)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": "adam"}, r"optimizer adam cannot take a step: Adam does not support sparse.*SGD and Adagrad"),
        ({"optimizer": "sgd", "weight_decay": 0.1}, "optimizer sgd cannot take a step: "),
        ({"optimizer": "sgd", "accumulate": 2}, "the gradient of table.weight is sparse: leave out accumulate"),
    ],
)
def test_what_torch_does_not_do_with_sparse_gradients_is_refused_before_the_first_epoch(settings, words):
    with pytest.raises(weft.SpecError, match=words) as error:
        run(tasks_of(Table, [0], **settings)[0])
    assert "\n" not in str(error.value)


def test_other_types_are_refused_in_bf16():
    with pytest.raises(weft.SpecError, match="parameter temp of model Gpr is float64, which trains in prec"):
        run(tasks_of(Gpr, [0], precision="bf16")[0])


def test_a_note_says_why_they_train_alone():
    notes = []
    collect = lambda event: notes.append(event.data["message"]) if event.kind == "note" else None  # noqa: E731
    run(tasks_of(Gpr, range(2), epochs=2), on_event=collect)
    run(tasks_of(Experts, [0]), on_event=collect)
    assert any("side by side, not as one stack: parameter temp of model Gpr is float64" in note for note in notes)
    assert any("had a gradient in some steps and none in others: torch's adam" in note for note in notes)
