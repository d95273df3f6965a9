"""Program: the operators of one training step, with the bytes they touch and the lifetimes of those.

A Program is captured from the step that will run (``weft.capture``) and read by the planner. Nothing in it
knows torch: sizes are plain numbers, so that memory and time can be worked out anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from weft.core.plain_data import PlainData

KINDS = ("graph", "input", "weight", "state", "activation", "gradient", "temporary", "constant")
PHASES = ("forward", "backward", "update", "evaluation")
# Families of operators, in the order in which names are tried; each with what the operator's own name holds.
_ATTENTION = ("attention", "edge_softmax", "sddmm", "coefficient")
_SCATTERS = ("scatter", "index_add", "index_put")
_GATHERS = ("spmm", "index", "gather", "scatter", "embedding", "segment", "take")
_PRODUCTS = ("mm", "linear", "matmul", "weight_grad", "einsum", "dot", "product")
_REDUCTIONS = (
    "sum", "mean", "amax", "amin", "max", "min", "var", "norm", "softmax", "cumsum", "sort", "topk", "cat", "argmax",
    "nonzero", "_to_copy",
)  # fmt: skip
ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
FAMILIES = ("attention", "spmm", "scatter", "gather", "matmul", "reduction", "allocation", "pointwise")
MARKER_KEPT = "weft.kept"  # closes a Program of what is done once: it costs nothing and reads all that stays


@dataclass(frozen=True)
class Value(PlainData):
    """One storage: tensors that are views of each other are one Value.

    ``kind`` is one of :data:`KINDS`; ``shape`` and ``dtype`` are those of the tensor that allocated it.
    """

    bytes: int
    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = "float32"


@dataclass(frozen=True)
class Operator(PlainData):
    """One call of an operator, in execution order.

    ``reads`` and ``writes`` are ids of Values; a written Value that no earlier operator wrote and that is not
    resident is allocated here. ``stream_bytes`` is traffic in order, ``gather_bytes`` whole rows fetched by index.
    ``workspace`` is alive inside the operator alone, in blocks of these ``pieces``; ``library`` says that it calls
    cuBLAS or its like, which keeps a workspace of its own. ``frees`` lists the Values that are freed after it; one
    that no operator lists is freed after its last use. ``stream``: operators of different streams may
    overlap, and share no memory pool. ``engine``: autograd's own thread calls it, for which libraries have workspaces
    of their own; ``lt``: called through cuBLASLt, which has one more. ``family`` is one of
    :data:`FAMILIES`, found when the operator is captured, or read from a file that does not have it.
    """

    name: str
    phase: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    flops: float = 0.0
    stream_bytes: float = 0.0
    gather_bytes: float = 0.0
    launches: int = 0
    workspace: int = 0
    frees: tuple[int, ...] = ()
    library: bool = False
    pieces: tuple[int, ...] = ()
    stream: int = 0
    engine: bool = False
    lt: bool = False
    family: str = ""

    def __post_init__(self) -> None:
        if not self.family:
            object.__setattr__(self, "family", family_of(self.name, self.flops > 0, self.gather_bytes > 0))


@cache
def family_of(name: str, computes: bool = True, gathers: bool = False) -> str:
    """The family of the operator ``name`` (``"aten.mm"``), which does arithmetic, or fetches rows by index.

    ``attention`` and ``spmm``: Weft's kernels over edges. ``gather`` and ``scatter``: torch's indexing of rows, the
    second with results that are whole only once everything was read, as are those of a ``reduction``.
    """
    library, _, own = name.rpartition(".")
    torchs = library == "aten"
    if torchs and own in ALLOCATIONS:
        return "allocation"
    if _has(own, _ATTENTION):
        return "attention"
    if gathers or _has(own, _GATHERS):
        return ("scatter" if _has(own, (*_SCATTERS, *_REDUCTIONS)) else "gather") if torchs else "spmm"
    if computes and _has(own, _PRODUCTS):
        return "matmul"
    return "reduction" if _has(own, _REDUCTIONS) else "pointwise"


def _has(name: str, marks: tuple[str, ...]) -> bool:
    return any(mark in name for mark in marks)


@dataclass(frozen=True)
class Program(PlainData):
    """The operator DAG of one training step of ``tasks`` tasks that share it.

    ``resident`` lists the Values that are alive before and after the step (graph, features, weights, optimizer
    state). ``unknown`` names the operators that no cost is known for. ``note`` says when and how the figures
    are not a plain capture. ``left`` are Values that the step makes and leaves behind, such as the weights that the
    model was last called with; ``carried`` are those that the step before left, which this one lets go, in that order.
    ``recordable``: whether the step can be captured as a CUDA graph; one that reads sizes from its data cannot.
    """

    values: tuple[Value, ...]
    operators: tuple[Operator, ...]
    resident: tuple[int, ...]
    unknown: tuple[str, ...] = ()
    tasks: int = 1
    note: str = ""
    carried: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    recordable: bool = True

    def bytes_by_kind(self, ids: tuple[int, ...] | None = None) -> dict[str, int]:
        """Bytes of the Values ``ids`` (None: all of them) by kind; kinds without any are left out."""
        total: dict[str, int] = {}
        for value in self.values if ids is None else (self.values[i] for i in ids):
            total[value.kind] = total.get(value.kind, 0) + value.bytes
        return total

    @property
    def resident_bytes(self) -> int:
        """Bytes that are alive before and after the step."""
        return sum(self.values[i].bytes for i in self.resident)

    def lifetimes(self) -> dict[int, tuple[int, int]]:
        """``(first, last)`` operator of every Value that the step itself allocates, by id.

        A Value is allocated at the first operator that touches it and goes after the one that frees it, or else
        after the last that touches it. What is carried is there from the first operator on, what is left to the last.
        """
        kept = set(self.resident)
        lives: dict[int, tuple[int, int]] = dict.fromkeys(self.carried, (0, 0)) if self.operators else {}
        for position, op in enumerate(self.operators):
            for value in (*op.reads, *op.writes, *op.frees):
                if value not in kept:
                    lives[value] = (lives[value][0] if value in lives else position, position)
        return lives | {value: (lives[value][0], len(self.operators) - 1) for value in self.left if value in lives}

    def ends(self) -> dict[int, list[int]]:
        """The Values that go after each operator, by its position; what is resident never goes."""
        ends: dict[int, list[int]] = {}
        for value, (_, last) in self.lifetimes().items():
            ends.setdefault(last, []).append(value)
        return ends
