"""Dispatch an operator to a method of the adjacency, if its class has one.

``spmm(adj, x)`` runs Weft's kernels for a plain :class:`~weft.ops.csr.adjacency.Adjacency`. A subclass with a method of
the operator's name (a shard that reads remote rows, a matrix with kernels of its own) gets the call instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from weft.ops.csr.adjacency import Adjacency

Result = TypeVar("Result")


def supplied_by_adjacency(operator: Callable[..., Result]) -> Callable[..., Result]:
    """``operator(adj, ...)``, or the method of that name on the class of ``adj`` if it has one."""
    name = operator.__name__

    @wraps(operator)
    def call(adj: Adjacency, *args: Any, **options: Any) -> Result:
        own = getattr(type(adj), name, None)
        return operator(adj, *args, **options) if own is None else own(adj, *args, **options)

    return call
