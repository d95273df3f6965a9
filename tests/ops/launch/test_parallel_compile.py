"""Versions of kernels are known from a dry run, compiled by children, and found by the launch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import weft
from tests.dry_runs import capture
from weft.graph.catalog.names import stats
from weft.ops.dense.adam import _adam_kernel
from weft.ops.launch.hooks import KernelVersion, Pointer, kernel_versions
from weft.ops.launch.triton_lang import COUNTS, LazyKernel, tl, triton
from weft.planner.grouping.groups import plan_as_one_group


@triton.jit
def _scale_kernel(x, out, count, parts, F: tl.constexpr):
    at = tl.program_id(0) * F + tl.arange(0, F)
    tl.store(out + at, tl.load(x + at, mask=at < count + parts, other=0.0) * 2.0, mask=at < count)


def meta(*shape):
    return torch.empty(*shape, device="meta")


def version(x, count, parts, F):
    return KernelVersion.of(_scale_kernel, (x, x, count, parts), {"F": F, "num_warps": 2})


def test_a_version_stands_for_all_launches_that_share_its_code():
    x = meta(64)
    first = version(x, 33, 7, 16)
    assert first == version(meta(64), 47, 16, 16), "parts is a count: multiples of 16 are nothing special"
    assert first.digest == version(x, 5, 1, 16).digest
    others = [version(x, 48, 7, 16), version(x, 1, 7, 16), version(x, 33, 7, 32), version(x[1:], 33, 7, 16)]
    others += [version(x.bfloat16(), 33, 7, 16), version(x, 2**40, 7, 16)]
    assert len({first, *others}) == 7
    assert "parts" in COUNTS


def test_launches_on_meta_tensors_are_noted_once():
    from weft.ops.launch.hooks import intercepted

    with intercepted(lambda *_: lambda *a, **k: None), kernel_versions() as found:
        for count in (33, 35, 48):
            _scale_kernel[(4,)](meta(64), meta(64), count, 3, F=16)
    assert len(found) == 2
    assert next(iter(found)).args[0] == Pointer(torch.float32, True)


def test_a_step_names_its_kernels_before_it_runs():
    task = weft.Task(graph="shape:cora", model="gcn", hidden=16, dropout=0.5)
    plan = plan_as_one_group([task], stats("shape:cora"), "cuda")
    with kernel_versions() as found:
        capture([task], stats("shape:cora"), "cuda", plan=plan)
    names = {one.name for one in found}
    assert {"_spmm_kernel", "_adam_kernel", "_cross_entropy_kernel", "_record_kernel"} <= names
    assert len(found) < 20


def test_a_kernel_is_lazy_until_it_is_needed():
    code = "import sys; from weft.ops.dense.adam import _adam_kernel as k; assert 'triton' not in sys.modules\n"
    code += "k.arg_names; assert 'triton' in sys.modules; assert type(k).__mro__[1].__name__ == 'JITFunction'"
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
    assert _adam_kernel.fn.__name__ == "_adam_kernel"
    assert isinstance(_adam_kernel, LazyKernel) or hasattr(_adam_kernel, "arg_names")


CHILD = """
import os, sys
import torch
sys.path.insert(0, {here!r})
from test_parallel_compile import _scale_kernel, version, meta
from weft.ops.launch.parallel_compile import CompileOnly, compile_versions
found = compile_versions([version(meta(64), 33, 7, 16), version(meta(64), 48, 7, 16)], 90, 2,
                         lambda done, total: print("told", done, total))
assert sorted(version.index for version in found) == [0, 1], found
assert all(os.path.isdir(one.folder) and one.seconds > 0 for one in found)
before = set(os.listdir(os.environ["TRITON_CACHE_DIR"]))
from triton.runtime import driver
driver.set_active(CompileOnly(90))  # a launch as it is made on a GPU, on real tensors, up to the launch itself
for count in (5, 64):
    _scale_kernel.run(torch.zeros(64), torch.zeros(64), count, 9, F=16, num_warps=2, grid=(4,), warmup=True)
assert set(os.listdir(os.environ["TRITON_CACHE_DIR"])) == before, "the launch finds what the children compiled"
_scale_kernel.run(torch.zeros(64), torch.zeros(64), 1, 9, F=16, num_warps=2, grid=(4,), warmup=True)
assert set(os.listdir(os.environ["TRITON_CACHE_DIR"])) > before, "and compiles what they did not"
"""


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
def test_children_compile_and_a_launch_finds_it(tmp_path):
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    code = CHILD.format(here=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "told 2 2" in done.stdout
