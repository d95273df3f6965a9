"""SparseFeatures against dense arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from weft.core.errors import GraphError
from weft.graph import SparseFeatures

matrices = npst.arrays(
    np.float32,
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
    elements=st.one_of(st.just(0.0), st.floats(-3, 3, width=32)),
)


@settings(max_examples=60, deadline=None)
@given(matrices)
def test_every_way_in_gives_the_same_matrix(dense):
    csr = sp.csr_array(dense)
    for features in (
        SparseFeatures.from_scipy(csr),
        SparseFeatures.from_torch(torch.from_numpy(dense)),
        SparseFeatures.from_csr(csr.indptr, csr.indices, csr.data, dense.shape),
    ):
        assert features.shape == dense.shape
        assert features.nnz == csr.nnz
        np.testing.assert_array_equal(features.to_dense().numpy(), dense)


def test_product_and_its_gradient_equal_the_dense_ones():
    torch.manual_seed(0)
    dense = torch.rand(5, 4) * (torch.rand(5, 4) > 0.5)
    features = SparseFeatures.from_torch(dense)
    weight = torch.rand(4, 3, requires_grad=True)
    (features @ weight).square().sum().backward()
    expected = torch.autograd.grad((dense @ weight).square().sum(), weight)[0]
    torch.testing.assert_close(weight.grad, expected)


def test_values_at_the_same_place_are_added():
    rows, cols = torch.tensor([1, 0, 1]), torch.tensor([2, 0, 2])
    features = SparseFeatures.from_coo(rows, cols, torch.tensor([1.0, 5.0, 2.0]), (2, 3))
    assert features.to_dense().tolist() == [[5, 0, 0], [0, 0, 3]]
    assert "2 x 3" in repr(features)


@pytest.mark.parametrize(
    ("indptr", "indices", "data", "message"),
    [
        ([0, 1], [0], [1.0], "expected 3 offsets"),
        ([0, 1, 2], [0, 1], [1.0], "1 entries"),
        ([0, 1, 2], [0, 3], [1.0, 1.0], r"x_indices\[1\] = 3 is out of range: feature ids must lie in 0..2"),
        ([0, 0, 2], [1, 1], [1.0, 1.0], r"x_indices\[1\] = 1 follows 1"),
        ([0, 2, 1], [0, 1], [1.0, 1.0], r"x_indptr\[2\] = 1 but there are 2"),
    ],
)
def test_wrong_csr_is_named(indptr, indices, data, message):
    with pytest.raises(GraphError, match=message):
        SparseFeatures.from_csr(indptr, indices, data, (2, 3))
