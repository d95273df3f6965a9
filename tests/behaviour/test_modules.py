"""Users' own modules: the numbers of a plain loop of PyTorch, alone and in a sweep, or a refusal of one sentence."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.behaviour import calls, modules
from tests.behaviour.cases import graph
from tests.behaviour.plain_loop import EPOCHS, RATE, assert_losses, seed_all, train

EXACT = [*modules.EXACT, *modules.PYG]


def task(model, seed=0, **settings) -> weft.Task:
    name = f"{getattr(model, '__name__', 'module')}-{seed}"
    return weft.Task(
        **{"graph": graph(), "model": model, "seed": seed, "lr": RATE, "epochs": EPOCHS, "name": name, **settings}
    )


def plain(model, seed=0):
    """The module after a plain loop, with its training and validation losses."""
    seed_all(seed)
    module = model(graph().num_features, graph().num_classes)
    return module, *train(module)


@pytest.mark.parametrize("model", EXACT)
def test_alone_a_module_trains_as_in_a_plain_loop(model):
    found = calls.run(task(model))
    module, losses, validation = plain(model)
    assert_losses(found.history["loss"], losses)
    assert_losses(found.history["val_loss"], validation)
    assert found.model.state_dict().keys() == module.state_dict().keys()


@pytest.mark.parametrize("model", EXACT)
def test_in_a_sweep_a_module_trains_as_in_a_plain_loop(model):
    for seed, found in enumerate(calls.run([task(model, seed) for seed in range(3)])):
        assert found.status == "finished"
        assert_losses(found.history["loss"], plain(model, seed)[1])


@pytest.mark.parametrize("model", modules.EXACT_OR_REFUSED)
@pytest.mark.parametrize("members", [1, 2])
def test_a_module_with_state_of_its_own_is_exact_or_refused(model, members):
    tasks = [task(model, seed) for seed in range(members)]
    try:
        results = [calls.run(tasks[0])] if members == 1 else list(calls.run(tasks))
        refusals = [result.message for result in results if result.status == "failed"]
    except weft.WeftError as error:
        results, refusals = [], [str(error)]
    assert all(message and "\n" not in message for message in refusals)
    for seed, found in enumerate(results):
        if found.status != "failed":
            assert_losses(found.history["loss"], plain(model, seed)[1])


def test_a_module_given_as_an_object_keeps_its_weights_and_is_not_changed():
    seed_all(4)
    module = modules.Base(graph().num_features, graph().num_classes)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    found = calls.run(task(module))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert_losses(found.history["loss"], train(module)[0])


def test_settings_reach_the_parameters_of_a_callable():
    found = calls.run(task(modules.Dense, hidden=5))
    assert found.model.first.out_features == 5
    with pytest.raises(weft.SpecError, match="hidden"):
        calls.run(task(modules.Base, hidden=5))


def test_a_module_that_fails_is_quoted_and_others_of_the_sweep_finish():
    class Fails(modules.Base):
        def forward(self, x, adj):
            if self.training:
                raise ValueError("no such row")
            return super().forward(x, adj)

    results = calls.run([task(modules.Base), task(Fails)])
    assert [result.status for result in results] == ["finished", "failed"]
    assert "no such row" in results[1].message
    with pytest.raises(weft.WeftError, match="no such row"):
        calls.run(task(Fails))


def test_objectives_and_metrics_of_ones_own():
    def doubled(output, y, rows):
        return 2 * torch.nn.functional.cross_entropy(output[rows], y[rows])

    one, two = (
        calls.run(task(modules.Base)),
        calls.run(task(modules.Base, objective=doubled, optimizer="sgd", epochs=1)),
    )
    assert two.history["loss"][0] == pytest.approx(2 * one.history["loss"][0], rel=1e-5)


def test_a_module_of_pyg_has_the_numbers_of_pyg_converted_or_not():
    converted, kept = (calls.run(task(modules.PygGCN, convert=convert)) for convert in (None, False))
    assert_losses(converted.history["loss"], kept.history["loss"])
    data = graph()
    torch.testing.assert_close(
        converted.model(data.x, data.edge_index()), kept.model(data.x, data.edge_index()), rtol=1e-3, atol=1e-4
    )


class KeepsBoundMethod(torch.nn.Module):
    """A deep copy of it would go on with the original's weights."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(out_features, in_features) / 8)
        self.turned = self.weight.t

    def forward(self, x):
        return x @ self.turned()


def test_the_model_of_a_result_follows_its_own_weights():
    result = calls.run(weft.Task(graph=graph(), model=KeepsBoundMethod, epochs=5, lr=0.1))
    assert torch.equal(result.model.turned().T, result.model.weight)


SEEN = {}


class FillsGlobalCache(torch.nn.Linear):
    def forward(self, x):
        if "half" not in SEEN:
            SEEN["half"] = torch.full((x.shape[0], 1), 0.5, device=x.device)
        return super().forward(x) * SEEN["half"]


def test_a_plan_leaves_nothing_in_the_globals_of_a_module():
    task = weft.Task(graph=graph(), model=FillsGlobalCache, epochs=2, metric=lambda logits, y, rows: logits.sum() * 0)
    assert calls.plan(task, machine="h200").fits
    assert not SEEN
    assert calls.run(task).status == "finished"
