"""Go on training a model that was trained before, on the same graph or another, with layers that stay as they are."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import SpecError

QUIET = {"progress": False, "device": "cpu"}


def test_a_trained_model_is_trained_on_from_its_weights():
    graph = tiny_graph()
    first = weft.run(weft.Task(graph, model="gcn", hidden=8, epochs=5, feature_norm="row"), **QUIET)
    before = {name: value.clone() for name, value in first.model.state_dict().items()}
    tuned = weft.run(weft.Task(graph, model=first.model, epochs=3, lr=1e-3, feature_norm="row"), **QUIET)
    logits = first.model(graph.x, graph.adj)
    loss = torch.nn.functional.cross_entropy(logits[graph.train], graph.y[graph.train])
    still = weft.run(weft.Task(graph, model=first.model, epochs=1, lr=1e-12, feature_norm="row"), **QUIET)
    assert torch.allclose(still.predict_logits(), first.predict_logits(), atol=1e-6)
    assert abs(still.history["train_loss"][0] - loss.item()) < 1e-5
    assert not torch.equal(tuned.model.convs[0].weight, before["convs.0.weight"])
    assert all(torch.equal(before[name], value) for name, value in first.model.state_dict().items())


def test_features_are_treated_as_in_the_training_before_or_it_is_refused():
    graph = tiny_graph()
    first = weft.run(weft.Task(graph, hidden=8, epochs=2, feature_norm="row"), **QUIET)
    with pytest.raises(SpecError, match="GCN was trained with feature_norm='row'; give it again"):
        weft.run(weft.Task(graph, model=first.model, epochs=1), **QUIET)


def test_layers_with_a_rate_of_zero_stay_as_they_are():
    source, target = tiny_graph(), tiny_graph(seed=3)
    first = weft.run(weft.Task(source, model="sage", hidden=8, epochs=4), **QUIET)
    frozen = {"convs.0.*": {"lr": 0.0, "weight_decay": 0.0}}
    tuned = weft.run(weft.Task(target, model=first.model, epochs=4, param_groups=frozen), **QUIET)
    old, new = first.model.state_dict(), tuned.model.state_dict()
    for name in old:
        assert torch.equal(old[name], new[name]) == name.startswith("convs.0."), name
    tuned.predict(target)


def test_several_rates_of_fine_tuning_are_a_sweep():
    graph = tiny_graph()
    first = weft.run(weft.Task(graph, hidden=8, epochs=4), **QUIET)
    result = weft.run(weft.Sweep(graph, model=first.model, lr=[1e-2, 1e-3], epochs=3), **QUIET)
    alone = weft.run(weft.Task(graph, model=first.model, lr=1e-3, epochs=3), **QUIET)
    assert torch.allclose(torch.tensor(result[1].history["loss"]), torch.tensor(alone.history["loss"]), atol=1e-5)


def test_a_model_out_of_a_folder_is_fine_tuned(tmp_path):
    graph = tiny_graph()
    weft.run(weft.Task(graph, hidden=8, epochs=4), out=tmp_path / "first", **QUIET)
    model = weft.read(tmp_path / "first", graph=graph).model
    assert weft.run(weft.Task(graph, model=model, epochs=2, lr=1e-3), **QUIET).status == "finished"
