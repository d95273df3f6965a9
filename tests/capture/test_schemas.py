"""Arguments of operators by the names of their schemas."""

from __future__ import annotations

import pytest

# Operators are registered by the import of their modules.
import weft.ops.attention.gat
import weft.ops.attention.gatv2
import weft.ops.sparse.edge_softmax
import weft.ops.sparse.sddmm
import weft.ops.sparse.spmm_max  # noqa: F401
from weft.capture.observer import argument, argument_places
from weft.weave.merge import FAMILY


def test_by_name():
    assert argument("weft.linear_backward", range(11), "wants_x") == 10
    assert argument("weft.cross_entropy_rows_backward", "glyr", "logits") == "l"
    assert argument("weft.product", ("x", "w"), "rate") is None  # it has none
    assert argument("weft.spmm", ("x",), "weight") is None  # left out


@pytest.mark.parametrize("name", FAMILY)
def test_every_operator_over_edges_names_its_csr(name):
    assert "csr" in argument_places(f"weft.{name}")
