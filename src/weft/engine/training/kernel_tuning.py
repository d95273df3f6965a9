"""The launch of the sharded kernel of a run: what was found on this machine for such a shape, or a search for it.

Kept per machine and shape in the folder of what Weft has learned. A launch is chosen before the first epoch and stays,
so a run's bits do not depend on how long its steps took.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.files import locked, write_text
from weft.core.task import Task
from weft.dist.ranks import Ranks
from weft.dist.sharded_adjacency import ShardedAdjacency
from weft.engine.base.home import machine_folder
from weft.engine.training.launch_search import launch_of, search_launch, shape_of
from weft.planner.kernel_tuner import CrossIterationSearch, KernelShape, TunedKernels

FILE = "sharded_kernels.json"
LEAST_EDGES = 1 << 22  # of all ranks: a search compiles a dozen kernels, which small graphs do not repay


def is_worth_tuning(adj: ShardedAdjacency, edges: int) -> bool:
    """Whether the kernel runs at all, and takes long enough."""
    return adj.device.type == "cuda" and adj.forward.exchange.is_needed and edges >= LEAST_EDGES


def choose_launch(adj: ShardedAdjacency, tasks: Sequence[Task], ranks: Ranks, machine: str) -> str:
    """Set the launch of all ranks; a sentence about it. All ranks call this together."""
    shape = shape_of(adj, max(task.hidden for task in tasks), ranks)
    name = f"{machine}, {ranks.ranks} ranks"
    found = ranks.share(load_tuned(machine).find(name, shape))
    words = "found before on this machine"
    if found is None:
        search = search_launch(adj, shape, ranks)
        found, words = search.best, _words(search)
        if ranks.rank == 0:
            _keep(machine, name, shape, search)
    ranks.staging.launch = launch_of(found)
    pieces = f"ps={found.ps}, dist={found.dist}, warps per block={found.wpb}"
    ways = {"pieces": pieces, "tiles": "by tiles of remote rows", "fetched": "remote rows first, then one sum"}
    return f"sharded kernel: {ways[found.way]} ({words})"


def _words(search: CrossIterationSearch) -> str:
    seconds = list(search.trials.values())
    return f"found in {len(seconds)} iterations, {seconds[0] / max(min(seconds), 1e-12):.2f}x as fast as the first"


def load_tuned(machine: str) -> TunedKernels:
    """What was found on the machine of that name; an empty table if nothing can be read."""
    try:
        return TunedKernels.from_json((machine_folder(machine) / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return TunedKernels()


def _keep(machine: str, name: str, shape: KernelShape, search: CrossIterationSearch) -> None:
    path = machine_folder(machine) / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path):
            write_text(path, load_tuned(machine).with_found(name, shape, search).to_json())
    except OSError:
        pass  # the next run searches again
