"""Large shapes for sampled training: made on the device in half precision, features then in pinned host memory.

papers100M's shape takes 28 GB on a GPU while it is made and 57 GB of the host as float32; a GPU makes it in 4 seconds,
pinning takes most of the time. Where host memory is short, a smaller scale is made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.harness.graphs import make_graph
from benchmarks.harness.timing import synchronize
from weft.batches.placement import pinned, touched
from weft.core.host_memory import free_host_bytes
from weft.graph.graph import Graph
from weft.graph.labels import SPLITS

PAPERS, NODES, ROW_BYTES = "papers100m", 111_059_956, 128 * 4
EDGE_BYTES = 8 << 30  # of the edges in host memory
BESIDE = 12 << 30  # of host memory that must stay free beside the features
CHUNK = 1 << 22  # rows copied at once
SMALLER = (1.0, 0.5, 0.25, 0.1)


def fitting_scale(wanted: float, free: int | None = None) -> float:
    """``wanted``, or the largest part of it that the host's free memory holds."""
    free = free_host_bytes() if free is None else free
    scales = [wanted * part for part in SMALLER]
    needed = {scale: (NODES * ROW_BYTES + EDGE_BYTES) * scale + BESIDE for scale in scales}
    return next((scale for scale in scales if needed[scale] <= free), scales[-1])


def papers_graph(device: torch.device, scale: float) -> Graph:
    """papers100M's shape with edges on ``device`` and float32 features in host memory, pinned beside a GPU."""
    graph = make_graph(PAPERS, device, scale)
    x, graph.x = host_features(graph.x), None
    if device.type != "cuda":
        return graph._changed(x=x)
    # Arrays that were made there lie among the holes of their making: segments that would count as taken.
    names = ("adj", "y", *SPLITS)
    graph = graph._changed(x=x, **{name: getattr(graph, name).to("cpu") for name in names})
    torch.cuda.empty_cache()
    return graph._changed(**{name: getattr(graph, name).to(device) for name in names})


def host_features(x: Tensor) -> Tensor:
    """``x`` as float32 in host memory, copied in chunks."""
    host = touched(x.shape, torch.float32)
    if x.is_cuda:
        host = pinned(host)
    for first in range(0, x.shape[0], CHUNK):
        host[first : first + CHUNK].copy_(x[first : first + CHUNK].float(), non_blocking=True)
    synchronize(x.device)
    return host
