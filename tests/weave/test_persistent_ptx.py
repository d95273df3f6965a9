"""The code of a step as one kernel, as a GPU gets it: its PTX, run on the CPU with several programs.

The interpreter runs the Python of a kernel, so it does not see what the compiler makes of it.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

from tests.ptx.launching import run_as_ptx  # noqa: E402  after Triton was found
from tests.weave.interpreted.test_persistent_step import AS_ON_A_GPU, small_graph, stack_of  # noqa: E402
from weft.ops.dense.linear_triton import linear_triton  # noqa: E402
from weft.ops.launch import backend  # noqa: E402
from weft.ops.launch.hooks import intercepted  # noqa: E402
from weft.weave.merged_launch import collected, launch_parts  # noqa: E402
from weft.weave.persistent.kernel import PhasesLaunch, launch_phases  # noqa: E402
from weft.weave.persistent.step import PersistentStep  # noqa: E402


def drawn(*sizes):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def test_phases_that_differ_in_constants_alone():
    x, first, second, bias = drawn(70, 16), drawn(3, 16), drawn(3, 16), drawn(3)
    with collected() as parts:
        between = linear_triton(x, first)
        found = linear_triton(x, second, bias, add=between, act="relu")
    counter = torch.full((1,), 2**31 - 2, dtype=torch.int32)  # it passes the largest number on the way
    with run_as_ptx() as made:
        launch_phases([[part] for part in parts], counter, PhasesLaunch(2))
    assert made == ["persistent_kernel"]
    torch.testing.assert_close(found, torch.relu(x @ second.T + bias + x @ first.T), rtol=1e-5, atol=1e-5)


def test_merged_parts_that_differ_in_constants_alone():
    x, first, second, bias = drawn(70, 16), drawn(3, 16), drawn(3, 16), drawn(3)
    with collected() as parts:
        plain, activated = linear_triton(x, first, bias), linear_triton(x, second, bias, act="relu")
    with run_as_ptx() as made:
        launch_parts(parts)
    assert made == ["woven_kernel"]
    torch.testing.assert_close(plain, x @ first.T + bias, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(activated, torch.relu(x @ second.T + bias), rtol=1e-5, atol=1e-5)


def traced(model: str) -> PersistentStep:
    """The step of a stack in its first state; its own launches are left out, which would take a minute to compile."""
    with intercepted(lambda *launch: lambda *args, **options: None):
        stack = stack_of(small_graph(), model=model)
        begin = stack.state.snapshot()
        step = PersistentStep(stack, PhasesLaunch(4))
    stack.state.restore(begin)
    return step


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gcn", "sage", "gat"])
def test_steps_of_the_stack(model, monkeypatch):
    expected = stack_of(small_graph(), model=model)
    losses = [expected.train_step(expected.source.example()).clone() for _ in range(2)]
    monkeypatch.setattr(backend.on_gpu, "__code__", AS_ON_A_GPU)
    step = traced(model)
    with run_as_ptx() as made:
        found = [step().clone() for _ in range(2)]
    assert set(made) == {"persistent_kernel"}
    torch.testing.assert_close(found, losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step.stack.state.flat, expected.state.flat, rtol=1e-3, atol=1e-4)
