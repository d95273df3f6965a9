"""Tuner of the sharded kernel: an analytical model that says what can run well, and a search during training (MGG).

The model has the work of a warp and the shared memory of a block (equation 1 of the paper), warps (2), blocks and
blocks per multiprocessor (3):

    WPW  = 2 ps D dist              SMEM        = ps wpb 4 + 2 wpb D 4
    warps = max(local, remote) / dist            blocks per SM = warps / wpb / SMs

The search starts at (1, 1, 1) and changes one parameter per training iteration: ``ps`` doubles while that helps, then
``dist``, then ``wpb``; when ``wpb`` stops helping, ``ps`` retreats to its second best value and ``wpb`` continues from
there, until nothing gets among the three best. It takes about ten iterations, and the best is stored per machine and
shape. Nothing here measures: training takes the next configuration and reports how long it took.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, field

from weft.core.errors import SpecError
from weft.core.settings import SHARDED_KERNELS

MOST = {"ps": 32, "dist": 16, "wpb": 16}
WORD = 4  # bytes of an index, and of a number
TOP = 3  # the search ends when changes get no further than this many best
MOST_TRIALS = 24


@dataclass(frozen=True, order=True)
class KernelConfig:
    """``ps``: neighbours of a piece. ``dist``: pairs of local and remote pieces per warp. ``wpb``: warps per block.

    ``way``: see :mod:`weft.core.settings`; the other numbers are of ``"staged"`` and ``"interleaved"``.
    """

    ps: int = 1
    dist: int = 1
    wpb: int = 1
    way: str = "staged"

    def __post_init__(self) -> None:
        if self.way not in SHARDED_KERNELS:
            raise SpecError(f"way={self.way!r} must be one of {', '.join(SHARDED_KERNELS)}")
        for name, most in MOST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise SpecError(f"{name}={value!r} must be a whole number from 1 to {most}")


@dataclass(frozen=True)
class KernelShape:
    """What a launch works on: rows of ``features`` numbers, and how many edges are local and remote.

    ``rows``: rows with edges of each kind, at most; pieces of ``ps`` neighbours are counted from both.
    """

    features: int
    local_edges: int
    remote_edges: int
    rows: int

    def pieces(self, ps: int) -> tuple[int, int]:
        """Local and remote pieces, about: edges are cut by ``ps``, and every row leaves one that is not full."""
        return tuple(  # type: ignore[return-value]
            0 if not edges else min(edges, math.ceil(edges / ps) + self.rows // 2)
            for edges in (self.local_edges, self.remote_edges)
        )

    def key(self) -> str:
        """Shapes with equal keys are tuned once: sizes to the nearest power of two."""
        sizes = (self.features, self.local_edges, self.remote_edges, self.rows)
        return "x".join(str(round(math.log2(size)) if size else 0) for size in sizes)


@dataclass(frozen=True)
class Multiprocessors:
    """The limits of a GPU: multiprocessors, shared memory of each, warps and blocks that each can hold."""

    count: int = 132
    shared_bytes: int = 227 * 1024
    warps: int = 64
    blocks: int = 32


@dataclass(frozen=True)
class KernelEstimate:
    """What the model says of a configuration."""

    work_per_warp: int  # numbers that one warp adds up
    shared_bytes: int  # of a block
    warps: int
    blocks: int
    blocks_per_multiprocessor: float
    resident_blocks: int  # that fit on a multiprocessor at once


def estimate(config: KernelConfig, shape: KernelShape, device: Multiprocessors | None = None) -> KernelEstimate:
    """The model's numbers for ``config``."""
    device = device or Multiprocessors()
    ps, dist, wpb, width = config.ps, config.dist, config.wpb, shape.features
    shared = ps * wpb * WORD + 2 * wpb * width * WORD
    warps = math.ceil(max(shape.pieces(ps)) / dist)
    blocks = math.ceil(warps / wpb)
    resident = min(device.shared_bytes // shared, device.warps // wpb, device.blocks)
    return KernelEstimate(2 * ps * width * dist, shared, warps, blocks, blocks / device.count, resident)


def is_sensible(config: KernelConfig, shape: KernelShape, device: Multiprocessors | None = None) -> bool:
    """Whether a block fits, and there are enough of them for every multiprocessor to have one."""
    model = estimate(config, shape, device)
    return model.resident_blocks > 0 and (model.blocks_per_multiprocessor >= 1.0 or config == KernelConfig())


@dataclass
class CrossIterationSearch:
    """The search of the paper: :meth:`next` gives the configuration to train with, :meth:`tell` how long it took.

    ``allowed`` rules out configurations without trying them. ``trials`` has every one that was tried, in order,
    those included that the caller adds because the search does not come by them.
    """

    allowed: Callable[[KernelConfig], bool] = lambda config: True
    trials: dict[KernelConfig, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._moves = self._search()
        self._next: KernelConfig | None = next(self._moves)

    @property
    def finished(self) -> bool:
        """Whether the search is over, and :meth:`next` is the best found."""
        return self._next is None

    @property
    def best(self) -> KernelConfig:
        """The fastest configuration so far; the first one before any was tried."""
        return min(self.trials, key=lambda config: (self.trials[config], config), default=KernelConfig())

    def next(self) -> KernelConfig:
        """What to train the next iteration with."""
        return self.best if self._next is None else self._next

    def tell(self, seconds: float) -> None:
        """The iteration with :meth:`next` took ``seconds``."""
        if self._next is None:
            return
        self.trials[self._next] = seconds
        self._next = next(self._moves, None) if len(self.trials) < MOST_TRIALS else None

    def _search(self) -> Iterator[KernelConfig]:
        start = KernelConfig()
        yield start
        best = yield from self._climb(start, "ps")
        by_ps = sorted((seconds, config) for config, seconds in self.trials.items())
        best = yield from self._climb(best, "dist")
        best = yield from self._climb(best, "wpb")
        if len(by_ps) > 1:  # retreat to the second best ps, and widen the block from there
            retreat = KernelConfig(by_ps[1][1].ps, best.dist, best.wpb)
            if self._is_new(retreat):
                yield retreat
                if self.trials.get(retreat) in sorted(self.trials.values())[:TOP]:
                    yield from self._climb(retreat, "wpb")

    def _climb(self, start: KernelConfig, name: str) -> Generator[KernelConfig, None, KernelConfig]:
        """Double one parameter while that makes an iteration faster; the best of them."""
        best = start
        while getattr(best, name) * 2 <= MOST[name]:
            after = KernelConfig(**{**asdict(best), name: getattr(best, name) * 2})
            if self._is_new(after):
                yield after
            if after not in self.trials or self.trials[after] >= self.trials[best]:
                break
            best = after
        return best

    def _is_new(self, config: KernelConfig) -> bool:
        return config not in self.trials and self.allowed(config)
