"""What a process loads: a run imports what it uses, and commands that need no torch do without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SPEC = 'graph = "demo"\n[model]\nname = "gcn"\n[train]\nepochs = 2\n'
GENEROUS_SECONDS = 20.0  # on a machine that others use; a quiet one takes a hundredth of it

# Everything under these is for something that a run of a built-in model on a CPU does not do.
NOT_ON_A_CPU = (
    *("torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "sympy", "triton", "rich"),
    *("weft.capture", "weft.weave", "weft.serve", "weft.graph.generate"),
    *("weft.batches.sampler", "weft.batches.pipeline", "weft.dist.launch", "weft.dist.ranks", "weft.dist.exchange"),
    *("weft.engine.page", "weft.engine.charts", "weft.runtime.compile", "weft.runtime.dry_run"),
)


def modules_after(code: str, *arguments: str, home: Path) -> list[str]:
    """The modules that a fresh process has imported when ``code`` is over."""
    tail = "\nimport sys, json; print('MODULES' + json.dumps(sorted(sys.modules)))"
    env = {**os.environ, "WEFT_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-c", code + tail, *arguments], env=env, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.rpartition("MODULES")[2])


def under(modules: list[str], names: tuple[str, ...]) -> list[str]:
    return [module for module in modules if any(module == name or module.startswith(name + ".") for name in names)]


@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_a_run_on_a_cpu_imports_no_compiler_and_nothing_of_a_gpu(model, tmp_path):
    code = (
        "import weft\n"
        f"r = weft.run(weft.Task(graph='demo', model={model!r}, hidden=8, epochs=2, dropout=0.5), device='cpu', "
        "progress=False)\n"
        "assert r.status == 'finished'"
    )
    assert under(modules_after(code, home=tmp_path), NOT_ON_A_CPU) == []


def test_a_run_adds_nothing_to_what_torch_imports_of_its_distributed_package(tmp_path):
    names = ("torch.distributed",)
    torch_alone = under(modules_after("import torch", home=tmp_path), names)
    code = "import weft; weft.run(weft.Task(graph='demo', hidden=8, epochs=1), device='cpu', progress=False)"
    assert under(modules_after(code, home=tmp_path), names) == torch_alone


def test_a_step_on_a_gpu_needs_no_numba():
    """As far as that can be seen without one: the launchers on meta tensors, and the CPU kernels' package."""
    code = (
        "from weft.engine.plan import plan; from weft.core.task import Task\n"
        "plan(Task(graph='shape:cora', model='gat'), machine='h200')"
    )
    assert under(modules_after(code, home=Path(os.devnull)), ("numba", "torch._dynamo", "sympy")) == []


COMMAND = "import sys\nfrom weft.cli.main import main\ntry:\n    main()\nexcept SystemExit:\n    pass"


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["data", "ls"], ["run", "BAD"], ["plan", "BAD"]])
def test_a_command_that_needs_no_torch_does_without_it(words, tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text(SPEC.replace("gcn", "gnc"))
    begin = time.perf_counter()
    found = modules_after(COMMAND, *(str(bad) if word == "BAD" else word for word in words), home=tmp_path)
    assert under(found, ("torch", "numpy", "numba")) == []
    assert time.perf_counter() - begin < GENEROUS_SECONDS


def test_a_mistake_in_a_spec_is_one_line_and_exit_code_2(tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text(SPEC.replace("epochs = 2", "epochs = 0"))
    done = subprocess.run([sys.executable, "-m", "weft", "run", str(bad)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("weft: error:")
    assert done.stderr.count("\n") == 1
