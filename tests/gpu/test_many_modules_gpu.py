"""The sixty modules on a GPU: recorded as eager, alone as a plain loop, stacked as alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch_geometric")
from tests.runtime.user_modules import test_many_modules as cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:The usage of `scatter:UserWarning"),  # PyG's advice to install torch-scatter
]


@pytest.mark.parametrize("name", cases.MODULES)
def test_recorded_is_eager(name):
    """A module that cannot be recorded runs eagerly in both, with a note."""
    (recorded,) = cases.trained(name, [0], "cuda", replay=True)
    (eager,) = cases.trained(name, [0], "cuda", replay=False)
    assert recorded == pytest.approx(eager, rel=1e-3, abs=1e-4)
    assert recorded == pytest.approx(cases.plain(name, device="cuda"), rel=2e-3, abs=2e-4)


@pytest.mark.parametrize("name", cases.MODULES)
def test_stacked_is_alone(name):
    together = cases.trained(name, [0, 1], "cuda", replay=True)
    for seed, one in enumerate(together):
        assert one == pytest.approx(cases.trained(name, [seed], "cuda", replay=False)[0], rel=2e-3, abs=2e-4)
