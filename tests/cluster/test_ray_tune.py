"""The trainable of docs/sweeps.md trains a stack in every trial of Ray Tune, which gets its rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import weft

ray = pytest.importorskip("ray")
tune = pytest.importorskip("ray.tune")

DOCUMENT = Path(__file__).parents[2] / "docs" / "sweeps.md"


@pytest.mark.rest
@pytest.mark.filterwarnings("ignore")
def test_a_trial_of_ray_tune_trains_a_stack(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "0")
    (code,) = re.findall(r"```python\n(def stack_of_seeds.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.S)
    names = {"weft": weft}
    exec(code, names)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        tuner = tune.Tuner(
            names["stack_of_seeds"],
            param_space={"lr": tune.grid_search([0.01, 0.05]), "hidden": 8},
            run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
        )
        results = tuner.fit()
    finally:
        ray.shutdown()
    assert not results.errors
    for outcome in results:
        rate = outcome.config["lr"]
        result = weft.run(weft.Sweep("demo", lr=rate, hidden=8, seed=range(4), epochs=20), device="cpu", progress=False)
        last = [each.history["val_accuracy"][-1] for each in result]
        assert outcome.metrics["epoch"] == 20
        assert outcome.metrics["val_accuracy"] == pytest.approx(sum(last) / 4)
