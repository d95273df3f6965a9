"""The generated kernels compile to sm_90 code, on a machine without a GPU: see test_triton_compiles.py."""

from __future__ import annotations

import os

import pytest
import torch

from .interpreted.walks import numbers, small, walks
from .test_triton_compiles import OPTIONS, kind_of

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


def compile_all(launches) -> list[str]:
    """The PTX of every launch."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    assert launches
    found = []
    for kernel, signature, constants, attributes, options in launches.values():
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        assert ".target sm_90" in compiled.asm["ptx"]
        found.append(compiled.asm["ptx"])
    return found


def packed(walk):
    return [walk.indptr, walk.indices, walk.perm, walk.row_of_edge, *walk.work.tensors()]


def spmm_calls(dtype):
    """Sums of two widths along both directions, a maximum and its gradient, and a push."""
    from weft.ops.multi import Call

    adj = small()
    walk, back = (packed(walk) for walk in walks(adj))
    scales = torch.ones(adj.num_rows), torch.ones(adj.num_cols)
    x = numbers(2, adj.num_cols, 64, dtype=dtype)
    winner = torch.zeros(adj.num_rows, 32, dtype=torch.int32)
    return [
        Call("spmm", (x, numbers(adj.num_edges, dtype=dtype), *scales, walk, back, None)),
        Call("spmm", (x[0], numbers(adj.num_edges, dtype=dtype), *scales, walk, back, None)),
        Call("spmm", (numbers(adj.num_rows, 40, dtype=dtype), None, None, None, back, walk, None)),
        Call("spmm_max", (numbers(adj.num_cols, 32, dtype=dtype), None, walk, back)),
        Call("spmm_max_backward", (numbers(adj.num_rows, 32, dtype=dtype), winner, None, walk, back)),
        Call("spmm_push", (numbers(adj.num_rows, 64, dtype=dtype), None, *scales, walk, adj.num_cols)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_spmm_of_every_kind(launches, dtype):
    from weft.ops.multi import together_triton

    together_triton(spmm_calls(dtype))
    assert len(launches) == 2  # the walks, then the hubs
    compile_all(launches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sddmm_and_softmax(launches, dtype):
    from weft.ops.multi import Call, together_triton

    adj = small()
    walk = packed(walks(adj)[0])
    ends = numbers(adj.num_rows, 64, dtype=dtype), numbers(adj.num_cols, 64, dtype=dtype)
    scores = numbers(2, adj.num_edges, 4, dtype=dtype)
    calls = [Call("sddmm", (*ends, heads, walk, [])) for heads in (1, 4)]
    calls += [Call("edge_softmax", (scores, walk)), Call("edge_softmax_backward", (scores, scores, walk))]
    together_triton(calls)
    assert len(launches) == 2
    compile_all(launches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention(launches, dtype):
    from weft.ops.multi import Call, together_triton

    adj = small(num_rows=9, num_cols=9)
    walk, back = (packed(walk) for walk in walks(adj))
    random = torch.full((2,), 0.5), torch.zeros(2, 2, dtype=torch.int64), 3
    rows = [numbers(2, 9, heads * 18, dtype=dtype) for heads in (4, 2)]
    calls = [
        Call("graph_attention_packed", (row, heads, 0.2, *random, walk, back))
        for row, heads in zip(rows, (4, 2), strict=True)
    ]
    done = together_triton(calls)
    back_calls = [
        Call("graph_attention_packed_backward", (outs[0], row, *outs, 0.2, *random, walk, back))
        for row, outs in zip(rows, done, strict=True)
    ]
    together_triton(back_calls)
    compile_all(launches)


def test_loads_of_alike_sources_stay_wide(launches):
    """A select among addresses keeps what is known of their alignment: four floats to a load."""
    from weft.ops.multi import Call, together_triton

    adj = small()
    walk = packed(walks(adj)[0])
    x = numbers(adj.num_cols, 64)
    together_triton([Call("spmm", (x + seed, None, None, None, walk, [], None)) for seed in range(3)])
    assert "ld.global.v4" in compile_all(launches)[0]
