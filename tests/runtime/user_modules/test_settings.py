"""Settings reach the models of users, or are refused: none is reported as tried that had no effect."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import weft
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import SpecError
from weft.core.task import Task
from weft.runtime.modules.build import build_model
from weft.runtime.modules.settings import check_tasks, signature_of


class Net(nn.Module):
    """Two products, with a width and a rate of its own."""

    def __init__(self, in_features, out_features, hidden=16, dropout=0.2, *, power=1):
        super().__init__()
        self.first, self.last = nn.Linear(in_features, hidden), nn.Linear(hidden, out_features)
        self.rate, self.power = dropout, power

    def forward(self, x, adj):
        hidden = torch.relu(self.first(x))
        for _ in range(self.power):
            hidden = weft.ops.spmm(adj.gcn(), hidden)
        return self.last(nn.functional.dropout(hidden, self.rate, self.training))


class Plain(nn.Module):
    """Takes the two sizes alone."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.only = nn.Linear(inputs, outputs)

    def forward(self, x):
        return self.only(x)


def run(work, **options):
    return weft.run(work, device="cpu", progress=False, **options)


def built(model, **settings):
    return build_model(Task(graph="g", model=model, **settings), 5, 3)


# ---- what is passed ------------------------------------------------------------------------------------


def test_settings_by_the_names_of_the_signature():
    net = built(Net, hidden=32, dropout=0.7, model_args={"power": 2})
    assert (net.first.out_features, net.rate, net.power) == (32, 0.7, 2)


def test_what_the_task_leaves_out_is_left_to_the_module():
    assert built(Net).first.out_features == 16
    assert built(Net, hidden=64).first.out_features == 64  # given, though it is Weft's own default
    assert built(Net, hidden=64).rate == 0.2
    assert built(functools.partial(Net, hidden=24)).first.out_features == 24


def test_a_required_setting_is_passed_whether_given_or_not():
    assert built(lambda i, o, hidden: Net(i, o, hidden)).first.out_features == 64


def test_keywords_take_what_was_given():
    net = built(lambda i, o, **more: Net(i, o, **more), hidden=8, model_args={"power": 3})
    assert (net.first.out_features, net.rate, net.power) == (8, 0.2, 3)


def test_sizes_are_found_by_name_wherever_they_stand():
    model = built(weft.nn.GCN, hidden=8, layers=3)
    assert [(conv.in_features, conv.out_features) for conv in model.convs] == [(5, 8), (8, 8), (8, 3)]


def test_with_values_keeps_what_was_given_and_nothing_more():
    task = Task(graph="g", model=Net, hidden=64).with_values(lr=0.5, name="x")
    assert task.given == {"graph", "model", "hidden", "lr", "name"}
    assert build_model(task, 5, 3).first.out_features == 64


def test_a_file_gets_them_too_and_its_task_goes_through_json(tmp_path):
    (tmp_path / "made_net.py").write_text(
        "from torch import nn\n"
        "def make(i, o, hidden=16, width=2):\n"
        "    return nn.Sequential(nn.Linear(i, hidden), nn.Linear(hidden, width), nn.Linear(width, o))\n"
    )
    task = Task(graph="g", model=f"{tmp_path}/made_net.py:make", hidden=64, model_args={"width": 5})
    for one in (task, Task.from_dict(task.to_dict())):
        first, second, _ = build_model(one, 5, 3)
        assert (first.out_features, second.out_features) == (64, 5)
    left = Task.from_dict(task.with_values(model_args={}).to_dict())
    assert build_model(left, 5, 3)[1].out_features == 2


def test_a_sweep_over_settings_of_a_users_module_trains_different_modules():
    sweep = weft.Sweep(tiny_graph(), model=Net, hidden=[8, 64], dropout=[0, 0.9], seed=range(2), epochs=3)
    result = run(sweep)
    sizes = {one.name: sum(p.numel() for p in one.model.parameters()) for one in result}
    assert sizes["hidden=8 dropout=0 seed=0"] < sizes["hidden=64 dropout=0 seed=0"]
    losses = {one.name: one.history["loss"][-1] for one in result}
    assert losses["hidden=8 dropout=0 seed=0"] != losses["hidden=8 dropout=0.9 seed=0"]
    assert sorted(len(plan.members) for plan in result.plan) == [2, 2, 2, 2]  # seeds are stacked, widths are not
    for task, one in zip(sweep, result, strict=True):
        assert run(task).history["loss"] == pytest.approx(one.history["loss"], rel=1e-4)


def test_arguments_of_ones_own_are_swept_and_named():
    sweep = weft.Sweep(tiny_graph(), model=Net, model_args={"power": [1, 2]}, hidden=8, epochs=2, lr=[0.1, 0.2])
    assert [task.label for task in sweep] == ["lr=0.1 power=1", "lr=0.1 power=2", "lr=0.2 power=1", "lr=0.2 power=2"]
    result = run(sweep)
    assert [row["power"] for row in result.to_dicts()] == [1, 2, 1, 2]
    assert [one.model.power for one in result] == [1, 2, 1, 2]
    again = weft.Sweep.from_tasks(sweep.tasks())
    assert [task.model_args for task in again] == [task.model_args for task in sweep]
    assert all(task.given_to_model() == ("hidden",) for task in again)


def test_a_named_model_takes_arguments_of_its_own():
    result = run(Task(graph=tiny_graph(), model="gin", epochs=2, model_args={"train_eps": True}))
    assert "convs.0.eps" in dict(result.model.named_parameters())


# ---- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"heads": 4}, "heads=4 would have no effect: gcn has no heads"),
        ({"aggregator": "max"}, "gcn has no aggregator"),
        ({"model": "sage", "out_heads": 2}, "sage has no out_heads"),
        ({"momentum": 0.9}, "adam does not use momentum, sgd does"),
        ({"optimizer": "sgd", "betas": (0.8, 0.9)}, "sgd does not use betas, adam and adamw do"),
        ({"model": Plain, "hidden": 32}, r"Plain\(inputs, outputs\) has no parameter 'hidden'"),
        ({"model": Net, "heads": 2}, r"Net\(in_features, out_features, hidden=16, dropout=0.2, \*, power=1\) has no"),
        ({"model": nn.Linear(9, 3), "hidden": 32}, "the model is a Linear that is already built; give its class"),
        ({"model": nn.Linear(9, 3), "model_args": {"a": 1}}, "model_args: the model is a Linear that is already built"),
        ({"model": Net, "model_args": {"pover": 1}}, r"Net\(.*\) has no parameter 'pover' \(did you mean 'power'\?\)"),
        ({"model": "gin", "model_args": {"train_epz": True}}, "has no option 'train_epz'; did you mean 'train_eps'"),
    ],
)
def test_what_nothing_reads_is_refused_before_anything_is_trained(settings, words):
    task = Task(graph=tiny_graph(), epochs=1, **settings)
    for refuse in (run, weft.plan):
        with pytest.raises(SpecError, match=words):
            refuse(task)


@pytest.mark.parametrize(
    "tasks",
    [
        [Task(graph="g", heads=8, momentum=0.0)],  # equal to the defaults
        [Task(graph="g", model=model, heads=4) for model in ("gcn", "gat")],  # some read it, and it does not vary
        [Task(graph="g", optimizer=optimizer, momentum=0.9) for optimizer in ("sgd", "adam")],
        [Task(graph="g"), Task(graph="g", model="gat", heads=4)],
    ],
)
def test_what_is_harmless(tasks):
    check_tasks(tasks)


def test_what_varies_must_be_read_by_all():
    with pytest.raises(SpecError, match="gcn has no heads; leave it out; give it only to those that read it"):
        check_tasks(weft.Sweep("g", model=["gcn", "gat"], heads=[4, 8]).tasks())


def test_arguments_must_be_names_that_are_no_settings():
    with pytest.raises(SpecError, match="hidden is a setting of its own; give hidden="):
        Task(graph="g", model=Net, model_args={"hidden": 3})
    with pytest.raises(SpecError, match="model_args=3 must be a dict"):
        Task(graph="g", model=Net, model_args=3)


def test_a_callable_written_in_c_takes_the_sizes_alone():
    signature = signature_of(dict)
    assert not signature.open
    assert not signature.names


# ---- modules given as objects --------------------------------------------------------------------------


def test_seeds_of_one_object_are_refused():
    graph = tiny_graph()
    module = Net(graph.num_features, graph.num_classes)
    sweep = weft.Sweep(graph, model=module, seed=range(3), epochs=2)
    with pytest.raises(
        SpecError, match='of one Net object would begin with the same weights; give its class, or init="f'
    ):
        run(sweep)
    rates = run(weft.Sweep(graph, model=module, lr=[0.1, 0.2], epochs=2))
    assert rates[0].history["loss"][0] == pytest.approx(rates[1].history["loss"][0])


def test_fresh_weights_differ_by_seed_and_leave_the_object_alone():
    graph = tiny_graph()
    module = Net(graph.num_features, graph.num_classes, dropout=0.0)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    result = run(weft.Sweep(graph, model=module, init="fresh", seed=range(3), epochs=2))
    assert len({one.history["loss"][0] for one in result}) == 3
    again = run(weft.Sweep(graph, model=module, init="fresh", seed=range(3), epochs=2))
    assert [one.history for one in again] == [one.history for one in result]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_fresh_weights_need_somebody_who_knows_how_they_begin():
    class Scaled(Plain):
        def __init__(self):
            super().__init__(9, 3)
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return super().forward(x) * self.scale

    task = Task(graph=tiny_graph(), model=Scaled(), init="fresh", epochs=2)
    with pytest.raises(SpecError, match="nothing says how scale of Scaled begins; write a reset_parameters"):
        run(task)

    class Knows(Scaled):
        def reset_parameters(self):
            nn.init.uniform_(self.scale)

    drawn = [build_model(task.with_values(model=Knows(), seed=seed), 9, 3).scale for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_one_task_trains_an_object_as_it_was_given():
    graph = tiny_graph()
    module = Net(graph.num_features, graph.num_classes, dropout=0.0)
    loss = nn.functional.cross_entropy(module(graph.x, graph.adj)[graph.train], graph.y[graph.train]).item()
    assert run(Task(graph=graph, model=module, seed=7, epochs=1)).history["loss"][0] == pytest.approx(loss, rel=1e-5)


def test_a_width_is_not_given_the_number_of_classes():
    class Wide(nn.Module):
        def __init__(self, in_channels, hidden_channels, num_classes=3):
            super().__init__()
            self.only = nn.Linear(in_channels, num_classes)

    task = Task(graph="g", model=Wide)
    with pytest.raises(SpecError, match="would get out_features as 'hidden_channels': a model is called with"):
        check_tasks([task])
    check_tasks([task.with_values(model=functools.partial(Wide, hidden_channels=4))])


class Lightning(Plain):
    """As Lightning has it, of which no import is needed."""

    def training_step(self, batch, index):
        return torch.nn.functional.mse_loss(self(batch.x), batch.y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize("model", [Lightning, Lightning(8, 4), lambda inputs, outputs: Lightning(inputs, outputs)])
def test_training_steps_of_lightning_are_refused(model):
    """Weft would train it with another loss and another optimizer than it says."""
    with pytest.raises(SpecError, match=r"has training_step and configure_optimizers, .* Weft calls neither; give the"):
        build_model(Task(graph="g", model=model), 8, 4)
