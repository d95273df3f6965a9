"""Meta shape rules equal torch's own, leave other cases to torch, and do not import torch's compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from weft.capture.meta_shapes import shape_of
from weft.capture.observer import Observer

aten = torch.ops.aten
A, B = (torch.empty(3, 4, device="meta") for _ in range(2))
ROW, WIDE = torch.empty(4, device="meta"), torch.empty(5, 3, 4, device="meta")
WHOLE, HALF = torch.empty(3, 4, dtype=torch.int32, device="meta"), torch.empty(3, 4, dtype=torch.half, device="meta")
TURNED = torch.empty(4, 3, device="meta").t()
ROWS = torch.empty(7, dtype=torch.int64, device="meta")
MASK = torch.empty(3, 1, dtype=torch.bool, device="meta")


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.cat.default, ([A, B],)),
        (aten.cat.default, ([A, B], -1)),
        (aten.stack.default, ([A, B], -1)),
        (aten.cumsum.default, (WHOLE, 0)),
        (aten.cumsum.default, (A, 1)),
        (aten.add.Tensor, (A, ROW)),
        (aten.mul.Tensor, (WHOLE, 2.5)),
        (aten.mul.Tensor, (HALF, A)),
        (aten.sub.Tensor, (ROW.expand(3, 4), WIDE)),
        (aten.div.Tensor, (A, 3)),
        (aten.div.Tensor, (A, WHOLE)),
        (aten.add.Tensor, (WIDE[:, :2], WIDE[:, 1:])),
        (aten.rsqrt.default, (A,)),
        (aten.zeros_like.default, (WHOLE,)),
        (aten.clamp.default, (WHOLE, 1)),
        (aten.isinf.default, (A,)),
        (aten.gt.Tensor, (WHOLE, A)),
        (aten.le.Scalar, (WHOLE, 3)),
        (aten.where.self, (MASK, A, ROW)),
        (aten.addmm.default, (ROW, A, torch.empty(4, 4, device="meta").t())),
        (aten.add.Tensor, (TURNED, A)),
        (aten.add.Tensor, (A, TURNED)),
        (aten.mul.Tensor, (A[None], TURNED)),
        (aten.mul.Scalar, (WHOLE, 2)),
        (aten.rsub.Scalar, (A, 1)),
        (aten.div.Scalar, (MASK.float().expand(3, 4), 60)),
        (aten.div.Scalar, (ROW.expand(5, 3, 4), 60)),
        (aten.add.Tensor, (ROW.expand(3, 4), MASK.expand(3, 4))),
        (aten.zeros_like.default, (ROW.expand(3, 4),)),
        (aten.mul.Tensor, (MASK.float().expand(3, 4), A)),
        (aten.bitwise_xor.Tensor, (WHOLE, WHOLE[None])),
        (aten.logical_not.default, (A,)),
        (aten.mean.dim, (A[:, 1:], [-1])),
        (aten.mean.dim, (WIDE, [0, 2], True)),
        (aten.logsumexp.default, (WIDE, [-1])),
        (aten.index.Tensor, (ROW, [ROWS.sum()])),
        (aten._log_softmax.default, (WIDE, -2, False)),
        (aten._log_softmax_backward_data.default, (WIDE, WIDE, -2, torch.float32)),
        (aten.binary_cross_entropy_with_logits.default, (A, B, None, None, 0)),
        (aten.index.Tensor, (A, [ROWS])),
        (aten.bmm.default, (WIDE, WIDE.transpose(1, 2))),
        (aten.mm.default, (A, A.t())),
        (aten.sum.dim_IntList, (A, [-1])),
        (aten.all.dim, (A, 1)),
        (aten.argmax.default, (A, 1)),
        (aten.gather.default, (A, 1, torch.empty(3, 2, dtype=torch.int64, device="meta"))),
        (aten.index_copy_.default, (A, 0, ROWS[:2], A[:2])),
        (aten.index_copy.default, (A, 0, ROWS[:2], A[:2])),
        (aten.new_empty.default, (WHOLE, [2, 7])),
        (aten.remainder.Tensor, (WHOLE, WHOLE)),
        (aten.bitwise_not.default, (MASK,)),
        (aten.addcmul.default, (A, A, ROW)),
    ],
)
def test_they_agree_with_torch(func, args):
    found, wanted = shape_of(func, args, {}), func(*args)
    assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (aten.arange.default, (7,), {"device": "meta"}),
        (aten.arange.start, (3, 7), {"device": "meta", "dtype": torch.int32}),
        (aten.add.Tensor, (A, A), {"alpha": 2}),
        (aten.new_empty.default, (A, [5]), {"dtype": torch.int64}),
        (aten.split_with_sizes_copy.out, (A, [1, 3], 1), {"out": [A[:, :1].clone(), A[:, 1:].clone()]}),
        (aten.sort.stable, (A,), {"stable": True, "descending": True}),
        (aten.native_layer_norm.default, (WIDE, [4], ROW, ROW, 1e-5), {}),
        (aten.native_layer_norm.default, (HALF, [4], None, None, 1e-5), {}),
        (aten.native_batch_norm.default, (A, ROW, ROW, ROW, ROW, True, 0.1, 1e-5), {}),
        (aten.native_batch_norm_backward.default, (A, A, ROW, ROW, ROW, ROW, ROW, True, 1e-5, [True, True, True]), {}),
        (
            aten.native_layer_norm_backward.default,
            (A, A, [4], A[:, :1].clone(), A[:, :1].clone(), ROW, ROW, [True, False, True]),
            {},
        ),
    ],
)
def test_they_agree_on_several_results_and_options(func, args, kwargs):
    def about(result):
        parts = result if isinstance(result, (tuple, list)) else (result,)
        return [None if part is None else (part.shape, part.stride(), part.dtype) for part in parts]

    found = shape_of(func, args, kwargs)
    assert found is not NotImplemented
    assert about(found) == about(func(*args, **kwargs))


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (aten.cat.default, ([A, WIDE],), {}),
        (aten.cat.default, ([A, WHOLE],), {}),
        (aten.add.Tensor, (A, torch.empty(5, device="meta")), {}),
        (aten.add.Tensor, (WHOLE, WHOLE), {"alpha": 2}),
        (aten.add.Tensor, (TURNED, ROW), {}),
        (aten.add.Tensor, (A, torch.empty(3, 4)), {}),
        (aten.arange.default, (2.5,), {"device": "meta"}),
        (aten.index.Tensor, (A, [MASK[:, 0]]), {}),
        (aten.native_batch_norm.default, (A, ROW, ROW, ROW, ROW, False, 0.1, 1e-5), {}),
        (aten.div.Tensor, (WHOLE, 2), {}),
        (aten.zeros_like.default, (A,), {"dtype": torch.int64}),
        (aten.addmm.default, (ROW, A, A), {}),
        (aten.mm.default, (A, A), {}),
        (aten.argmax.default, (A,), {}),
        (aten.index_copy_.default, (A, 0, ROWS[:2], A), {}),
        (aten.mean.dim, (ROW.sum(), [0]), {}),
        (aten.clamp.default, (MASK, 0, 1), {}),
    ],
)
def test_the_rest_is_left_to_torch(func, args, kwargs):
    assert shape_of(func, args, kwargs) is NotImplemented


def test_what_does_not_fit_is_an_error_in_torchs_words():
    with Observer("meta"), pytest.raises(RuntimeError):
        A + torch.empty(5, device="meta")


def test_in_place_is_in_place():
    assert shape_of(aten.add_.Tensor, (A, ROW), {}) is A
    assert shape_of(aten.add_.Tensor, (ROW, A), {}) is NotImplemented
    assert shape_of(aten.add_.Tensor, (WHOLE, WHOLE), {}) is WHOLE
    assert shape_of(aten.add_.Tensor, (WHOLE, A), {}) is NotImplemented
    assert shape_of(aten.div_.Tensor, (WHOLE, WHOLE), {}) is NotImplemented


def test_an_estimate_does_without_torchs_compiler():
    """Of all models but R-GCN, whose slots of relations are scattered: for that torch has the only rule."""
    code = (
        "import sys; from tests.graphs_for_tests import PRODUCTS; from weft.core.models import MODELS;"
        "from weft.core.task import Task;"
        "from weft.engine.plan import plan; from tests.dry_runs import capture\n"
        "for model in set(MODELS) - {'rgcn'}:\n"
        "    for norm in (None, 'batch', 'layer'):\n"
        "        capture(Task(graph='products', model=model, layers=3, norm=norm), PRODUCTS)\n"
        "        plan(Task(graph='shape:pubmed', model=model, norm=norm), machine='h200')\n"
        "        assert not {'torch._dynamo', 'sympy'} & sys.modules.keys(), (model, norm)\n"
        "for metric in ('roc_auc', 'f1_micro', 'f1_macro'):\n"
        "    plan(Task(graph='shape:pubmed', metric=metric), machine='h200')\n"
        "    assert 'torch._dynamo' not in sys.modules, metric\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
