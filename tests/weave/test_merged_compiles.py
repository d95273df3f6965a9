"""The generated kernels compile to sm_90 code, on a machine without a GPU: see test_triton_compiles.py."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.ops.interpreted.packed import both_csr, numbers, small
from tests.ops.test_triton_compiles import OPTIONS, kind_of

triton = pytest.importorskip("triton")

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]


@pytest.fixture
def launches(monkeypatch):
    """Distinct launches made during a test, specialised as a launch on a GPU specialises them.

    There a number that is 1 is a constant, and of addresses and multiples of 16 it is known that they are.
    """
    from triton.runtime.jit import JITFunction

    made = {}

    def record(self, *args, grid, warmup=False, **kwargs):
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        bound = dict(zip(self.arg_names, args, strict=False)) | kwargs
        fixed = {p.name for p in self.params if p.is_constexpr}
        fixed |= {name for name, value in bound.items() if isinstance(value, int) and value == 1}
        signature = {name: "constexpr" if name in fixed else kind_of(bound[name]) for name in self.arg_names}
        even = [
            (place,)
            for place, name in enumerate(self.arg_names)
            if name not in fixed and (isinstance(bound[name], torch.Tensor) or bound[name] % 16 == 0)
        ]
        source = (
            self,
            signature,
            {name: bound[name] for name in fixed},
            {key: [["tt.divisibility", 16]] for key in even},
        )
        made[str((self.__name__, signature, source[2]))] = (*source, options)

    monkeypatch.setattr(JITFunction, "run", record)
    return made


def resources(ptx: str, folder: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes that did not fit into them, as NVIDIA's assembler says."""
    target = re.search(r"\.target (\w+)", ptx)[1]
    (folder / "kernel.ptx").write_text(ptx)
    for assembler in sorted((Path(triton.__file__).parent / "backends" / "nvidia" / "bin").glob("ptxas*")):
        command = [assembler, "-v", f"--gpu-name={target}", "-o", folder / "kernel.cubin", folder / "kernel.ptx"]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        if said.returncode == 0:  # an older one does not know what Triton wrote
            text = said.stdout + said.stderr
            registers, spilled = (re.search(f, text)[1] for f in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
            return int(registers), int(spilled)
    pytest.skip("no assembler that comes with this Triton reads what it writes")


def compile_all(launches, most_shared: int = 232448) -> list[str]:
    """The PTX of every launch; a block of each has at most so much shared memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    assert launches
    found = []
    for kernel, signature, constants, attributes, options in launches.values():
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert ".target sm_90" in compiled.asm["ptx"]
        assert compiled.metadata.shared <= most_shared
        found.append(compiled.asm["ptx"])
    return found


def packed(csr):
    return [csr.indptr, csr.indices, csr.perm, csr.row_of_edge, *csr.work.tensors()]


def spmm_calls(dtype):
    """Sums of two widths along both directions, a maximum and its gradient, and a push."""
    from weft.weave.merged_launch import OpCall

    adj = small()
    csr, back = (packed(csr) for csr in both_csr(adj))
    scales = torch.ones(adj.num_rows), torch.ones(adj.num_cols)
    x = numbers(2, adj.num_cols, 64, dtype=dtype)
    winner = torch.zeros(adj.num_rows, 32, dtype=torch.int32)
    return [
        OpCall("spmm", (x, numbers(adj.num_edges, dtype=dtype), *scales, csr, back, None)),
        OpCall("spmm", (x[0], numbers(adj.num_edges, dtype=dtype), *scales, csr, back, None)),
        OpCall("spmm", (numbers(adj.num_rows, 40, dtype=dtype), None, None, None, back, csr, None)),
        OpCall("spmm_max", (numbers(adj.num_cols, 32, dtype=dtype), None, csr, back)),
        OpCall("spmm_max_backward", (numbers(adj.num_rows, 32, dtype=dtype), winner, None, csr, back)),
        OpCall("spmm_push", (numbers(adj.num_rows, 64, dtype=dtype), None, *scales, csr, adj.num_cols)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_spmm_of_every_kind(launches, dtype):
    from weft.weave.merged_launch import merged_call_triton

    merged_call_triton(spmm_calls(dtype))
    assert len(launches) == 2  # all rows, then the hubs
    compile_all(launches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sddmm_and_softmax(launches, dtype):
    from weft.weave.merged_launch import OpCall, merged_call_triton

    adj = small()
    csr = packed(both_csr(adj)[0])
    ends = numbers(adj.num_rows, 64, dtype=dtype), numbers(adj.num_cols, 64, dtype=dtype)
    scores = numbers(2, adj.num_edges, 4, dtype=dtype)
    calls = [OpCall("sddmm", (*ends, heads, csr, [])) for heads in (1, 4)]
    calls += [OpCall("edge_softmax", (scores, csr)), OpCall("edge_softmax_backward", (scores, scores, csr))]
    merged_call_triton(calls)
    assert len(launches) == 2
    compile_all(launches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention(launches, dtype):
    from weft.weave.merged_launch import OpCall, merged_call_triton

    adj = small(num_rows=9, num_cols=9)
    csr, back = (packed(csr) for csr in both_csr(adj))
    random = torch.full((2,), 0.5), torch.zeros(2, 2, dtype=torch.int64), 3
    rows = [numbers(2, 9, heads * 18, dtype=dtype) for heads in (4, 2)]
    calls = [
        OpCall("graph_attention_packed", (row, heads, 0.2, *random, csr, back))
        for row, heads in zip(rows, (4, 2), strict=True)
    ]
    done = merged_call_triton(calls)
    back_calls = [
        OpCall("graph_attention_packed_backward", (outs[0], row, *outs, 0.2, *random, csr, back))
        for row, outs in zip(rows, done, strict=True)
    ]
    merged_call_triton(back_calls)
    compile_all(launches)


def test_loads_of_alike_sources_stay_wide(launches):
    """A select among addresses keeps what is known of their alignment: four floats to a load."""
    from weft.weave.merged_launch import OpCall, merged_call_triton

    adj = small()
    csr = packed(both_csr(adj)[0])
    x = numbers(adj.num_cols, 64)
    merged_call_triton([OpCall("spmm", (x + seed, None, None, None, csr, [], None)) for seed in range(3)])
    assert "ld.global.v4" in compile_all(launches)[0]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    from weft.ops.launch import backend

    monkeypatch.setattr(backend.on_gpu, "__code__", (lambda tensor: True).__code__)


def random_numbers():
    return torch.full((2,), 0.5), torch.zeros(2, 2, dtype=torch.int64)


def test_products_of_a_layer(launches, as_on_a_gpu, tmp_path):
    """Forward, backward and weight gradients of hidden layers and of the last one: three blocks to a multiprocessor."""
    from weft.weave.merged_launch import OpCall, merged_call_triton

    rate, clock = random_numbers()
    x, grad, narrow = numbers(2, 640, 64), numbers(2, 640, 64, seed=1), numbers(2, 640, 3, seed=2)
    square, last = numbers(2, 64, 64), numbers(2, 3, 64)
    merged_call_triton(
        [
            OpCall("linear", (x, square, numbers(2, 64), None, "relu", rate, clock, 1)),
            OpCall("linear", (x, last, None, None, "none", None, None, 0)),
            OpCall("product", (grad, square)),
            OpCall("product", (narrow, last.transpose(1, 2).contiguous())),
            OpCall("weight_grad_parts", (grad, x)),
            OpCall("weight_grad_parts", (narrow, x)),
        ]
    )
    assert len(launches) == 1
    registers, spilled = resources(compile_all(launches, most_shared=232448 // 3)[0], tmp_path)
    assert registers <= 168  # of 65,536 for 3 blocks of 128 threads
    assert spilled == 0


def test_passes_beside_sums_over_edges(launches, as_on_a_gpu, tmp_path):
    """What a step does besides multiplying costs the sums over edges no occupancy to speak of."""
    from weft.weave.merged_launch import OpCall, merged_call_triton

    adj = small()
    csr = packed(both_csr(adj)[0])
    rate, clock = random_numbers()
    x = numbers(2, adj.num_cols, 64)
    scales = torch.ones(adj.num_rows), torch.ones(adj.num_cols)
    merged_call_triton(
        [
            OpCall("spmm", (x, None, *scales, csr, [], None)),
            OpCall("bias_act_dropout", (x, numbers(2, 64), "relu", rate, clock, 1)),
            OpCall("bias_act_dropout_backward_bias_parts", (x, x, [2, 64], "relu", rate, clock, 1)),
            OpCall("copied", (numbers(64, 500).t(),)),
        ]
    )
    registers, spilled = resources(compile_all(launches)[0], tmp_path)
    assert registers <= 128
    assert spilled == 0


def test_sums_and_updates(launches, as_on_a_gpu):
    from weft.weave.merged_launch import OpCall, merged_call_triton

    logits, labels, rows = numbers(2, 40, 3), torch.zeros(40, dtype=torch.int64), torch.arange(30)
    merged_call_triton(
        [
            OpCall("add_parts", (numbers(2, 9, 70), 64, 6, "float32")),
            OpCall("column_sum_parts", (logits,)),
            OpCall("cross_entropy_rows_parts", (logits, labels, rows)),
            OpCall("side_by_side", ([numbers(2, 5), numbers(2, 7)],)),
        ]
    )
    merged_call_triton([OpCall("cross_entropy_rows_backward", (torch.ones(2), logits, labels, rows))] * 2)
    state = [torch.zeros(2, 30) for _ in range(4)]
    merged_call_triton([OpCall("adam_", (*state, torch.zeros(2, 8), None))] * 2)
    compile_all(launches)
