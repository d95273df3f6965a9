"""Decide which layers of PyG in a user's module compute with Weft's operators, and remember what was decided.

A layer is converted if its class is exactly PyG's (no subclass), its settings are in the table of
:data:`weft.nn.pyg.layers.TEMPLATES`, and the installed PyG is one of :data:`TESTED`: for these a test compares outputs
and gradients with PyG's own in float64 (``tests/nn/pyg/test_proven.py``). Nothing is tried in a run.

Attention that drops coefficients draws other masks when it is converted, so only ``convert=True`` converts it. Over
sampled batches on a GPU nothing is converted either, unless the user requests it: a converted layer sorts the edges of
every batch, which takes longer than what it gains.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from weft.core.plain_data import PlainData
from weft.nn.pyg.convert import drawing, possible_swaps
from weft.nn.pyg.layers import TEMPLATES

# ---- Decisions on the stacks of a group before its first epoch, as a checkpoint holds them: a run that is resumed
# takes them over, so that it trains the same numbers.

STACKS = "stacks"  # the name in a checkpoint


@dataclass(frozen=True)
class Converted(PlainData):
    """The ``layers`` of PyG in a module that compute with Weft's operators: names with kinds, none if none do.

    ``sparse``: whether features need not become dense. ``note``: one sentence for the user.
    """

    layers: Mapping[str, str] = field(default_factory=dict)
    sparse: bool = False
    note: str | None = None


@dataclass(frozen=True)
class BuiltStack(PlainData):
    """Tasks that train in one step: ``members``, their places among the tasks of the group, row by row.

    ``converted``: None for built-in models; ``unsaved``: what keeps its training from being resumed, empty if nothing.
    """

    members: tuple[int, ...]
    converted: Converted | None = None
    unsaved: str = ""


def stacks_of(saved: Mapping[str, Any]) -> tuple[BuiltStack, ...]:
    """Those that a checkpoint holds; none in one that is older than they are."""
    return tuple(map(BuiltStack.from_dict, saved.get(STACKS, ())))


def described(stacks: Sequence[BuiltStack]) -> dict[str, Any]:
    """The inverse of :func:`stacks_of`: an entry of what a checkpoint holds."""
    return {STACKS: [stack.to_dict() for stack in stacks]}


def stack_of_one(saved: Mapping[str, Any], member: int) -> dict[str, Any]:
    """The same entry for a member of the group that continues alone; empty if there is none."""
    stacks = [replace(stack, members=(0,)) for stack in stacks_of(saved) if member in stack.members]
    return described(stacks) if stacks else {}


TESTED = ("2.8",)  # versions of PyG whose layers tests/nn/pyg/test_proven.py compares with Weft's
OTHER_MASKS = "; masks of attention are not those of convert=False"


def conversion_of(model: nn.Module, requested: bool, sampled_on_gpu: bool = False) -> Converted:
    """The layers of ``model`` that a run converts; ``requested``: by ``convert=True``, also those with other masks.

    The note says what is converted, and why other layers are not if that may surprise.
    """
    swaps = possible_swaps(model, draws=requested)
    if swaps.layers and not (version := sys.modules["torch_geometric"].__version__).startswith(TESTED):
        return Converted(
            note=f"not converted: Weft's layers are tested with PyG {', '.join(TESTED)}, and this is {version}"
        )
    reasons = {n: why for n, why in swaps.kept.items() if requested or why.split(":")[0] in TEMPLATES}
    reasons_text = "; ".join(dict.fromkeys(reasons.values()))
    if sampled_on_gpu and not requested and swaps.layers:
        # An H200, the arxiv shape, batches of 1,024: 0.71 to 0.93 times as fast (benchmarks/results/converted.json).
        faster = f"over sampled batches PyG's layers are faster (convert=True converts {swaps.counted()})"
        return Converted(note=f"not converted: {faster}")
    if not swaps.layers:
        nothing = "not converted: it has no layers of PyG" if requested else None
        return Converted(note=f"not converted: {reasons_text}" if reasons_text else nothing)
    masks = OTHER_MASKS if drawing(model, swaps.layers) else ""
    unconverted = f"; kept: {'; '.join(dict.fromkeys(swaps.kept.values()))}" if swaps.kept else ""
    counted = f"converted: {swaps.counted()} of PyG compute with Weft's operators (convert=False keeps them)"
    return Converted(swaps.layers, note=f"{counted}{masks}{unconverted}")
