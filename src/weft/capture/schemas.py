"""Read operator schemas: which arguments an operator writes, and which operators synchronise with the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

aten = torch.ops.aten
HOST_READS = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default)


@cache
def argument_places(operator: str) -> Mapping[str, int]:
    """Where the arguments of an operator (``"weft.spmm"``) stand, by their names in its schema."""
    namespace, _, name = operator.rpartition(".")
    schema = getattr(getattr(torch.ops, namespace), name).default._schema
    return MappingProxyType({argument.name: place for place, argument in enumerate(schema.arguments)})


def argument(operator: str, args: Sequence[Any], name: str) -> Any:
    """The argument called ``name`` among ``args``; None if the operator has none of that name, or it was left out."""
    place = argument_places(operator).get(name)
    return args[place] if place is not None and place < len(args) else None


@cache
def written_places(target: Any) -> tuple[tuple[int, str], ...]:
    """Places and names of the arguments that ``target`` writes to."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return ()
    written = (argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    pairs = zip(enumerate(schema.arguments), written, strict=True)
    return tuple((place, argument.name) for (place, argument), writes in pairs if writes)
