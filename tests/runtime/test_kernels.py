"""The Triton kernels of this layer: the same as torch under the interpreter, and real sm_90 code compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("program", ["interpreted_kernels.py", "interpreted_stack.py", "interpreted_modules.py"])
def test_interpreted_kernels_equal_the_cpu(program):
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, str(Path(__file__).with_name(program))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"


def compiled(kernel, types, constants):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = dict(types) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_kernels_compile_for_hopper():
    from weft.runtime.step.evaluation import _note_kernel, _record_kernel, _score_kernel

    scores = {
        "logits": "*fp32", "target": "*i64", "rows": "*i64", "starts": "*i64", "share": "*fp32",
        "smoothing": "*fp32", "sums": "*fp32", "C": "i32", "N": "i32",
    }  # fmt: skip
    for smooth in (False, True):
        assert compiled(_score_kernel, scores, {"BM": 256, "BC": 8, "SMOOTH": smooth}).asm["ptx"]
    pointers = dict.fromkeys(("rules", "clock", "epochs_done", "end_at", "epoch_at"), "*i64")
    record = {"rows": "*fp32", "history": "*fp32", **pointers, "score_at": "*fp32", "better_at": "*u8"}
    record |= {"L": "i32", "M": "i32", "STEPS": "i32"}
    constants = {"LOSSES": 4, "LOWEST": -1.0, "BLOCK": 8}
    ordered = {name: (record | dict.fromkeys(constants, "constexpr"))[name] for name in _record_kernel.arg_names}
    plain = {name: kind for name, kind in ordered.items() if kind != "constexpr"}
    assert compiled(_record_kernel, plain, constants).asm["ptx"]
    note = {"losses": "*fp32", "history": "*fp32", "clock": "*i64", "epochs_done": "*i64"}
    note |= {"L": "i32", "M": "i32", "STEPS": "i32"}
    assert compiled(_note_kernel, note, {}).asm["ptx"]
