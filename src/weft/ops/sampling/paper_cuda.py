"""TurboGNN's sampler in CUDA C++: a reservoir per row whose slots are claimed by atomics in shared memory.

Algorithm 1: a warp samples for one row. The slots of the row lie in shared memory and begin with neighbours 0 to K - 1;
the lanes draw a number for each later neighbour, and a neighbour whose number is below K claims that slot with an
atomic maximum. The warp then writes the row's neighbours at the slots, coalesced. Algorithm 2: rows are ordered by
descending degree and parted at a degree threshold: those above it have their slots in shared memory, the others in
global memory, in the result itself. In a part of few rows these go to the blocks in an interleaved order (1 .. m, then
m .. 1); in a large one every block takes consecutive rows and interleaves them among its warps.

What differs from the paper: both parts run in one launch instead of on two streams, because the size of the parts
stays on the device; and lane t of a warp reads where the warp's row t lies, so that a warp waits once for all of its
rows. Every row is written where its CSR has it, so there is nothing to merge. Picks are those of
:func:`weft.ops.sampling.reference.sample_reservoir_torch`, bit for bit.

Shapes: N nodes, E edges, S rows, K fan-out, P = S * K slots.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops.sampling.reference import HopSample, check_fanout, check_slots
from weft.ops.sampling.sample_triton import CachedLists, count_picks

ORDERS = ("sorted", "classes", "given")
CLASSES = 32  # of degrees: class c holds those whose highest bit is bit 30 - c; degree 0 is in the last
ALWAYS, NEVER = 0, 1 << 30  # degree thresholds
BLOCK = 256  # threads of the kernels that order rows

SOURCE = r"""
typedef unsigned long long u64;
constexpr unsigned ALL = 0xffffffffu;

__device__ __forceinline__ u64 splitmix(u64 value) {
    value += 0x9E3779B97F4A7C15ull;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
    return value ^ (value >> 31);
}

// Draw `number` of a stream: from 0 to `bound` - 1, all equally likely.
__device__ __forceinline__ unsigned draw_below(u64 stream, unsigned number, unsigned bound) {
    const u64 bits = splitmix(stream + number * 0x9E3779B97F4A7C15ull);
    return unsigned(((bits >> 32) * bound + (((bits & 0xffffffffull) * bound) >> 32)) >> 32);
}

// In-edges of row `row`; -1 if it does not exist.
__device__ __forceinline__ int degree_of(const Offset* indptr, const int* rows, int row, int count) {
    if (row >= count) return -1;
    const long long node = rows[row];
    return int(indptr[node + 1] - indptr[node]);
}

// Degrees, the sizes of their classes, and behind these the number of rows from the degree `threshold` on.
extern "C" __global__ void degrees_kernel(
    const Offset* indptr, const int* rows, const int* num_rows, int capacity, int threshold, int* degrees, int* sizes
) {
    __shared__ int found[32];
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    const int degree = row < capacity ? degree_of(indptr, rows, row, min(*num_rows, capacity)) : -1;
    if (row < capacity) degrees[row] = degree;
    if (threadIdx.x < 32) found[threadIdx.x] = 0;
    __syncthreads();
    if (degree >= 0) atomicAdd(found + __clz(degree) - 1, 1);
    const int high = __syncthreads_count(degree >= threshold);
    if (threadIdx.x < 32 && found[threadIdx.x]) atomicAdd(sizes + threadIdx.x, found[threadIdx.x]);
    if (threadIdx.x == 0 && high) atomicAdd(sizes + 32, high);
}

// Every row at a place of its class, classes of high degrees first.
extern "C" __global__ void order_kernel(const int* degrees, int capacity, const int* sizes, int* taken, int* order) {
    __shared__ int found[32], begin[32];
    const int row = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x;
    const int degree = row < capacity ? degrees[row] : -1, kind = degree < 0 ? 0 : __clz(degree) - 1;
    if (lane < 32) found[lane] = 0;
    __syncthreads();
    const int rank = degree < 0 ? 0 : atomicAdd(found + kind, 1);
    __syncthreads();
    if (lane < 32) {
        int sum = sizes[lane];
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(ALL, sum, step);
            if (lane >= step) sum += before;
        }
        begin[lane] = sum - sizes[lane] + (found[lane] ? atomicAdd(taken + lane, found[lane]) : 0);
    }
    __syncthreads();
    if (degree >= 0) order[begin[kind] + rank] = row;
}

struct Result {  // where picks go; `table` takes the first place of every neighbour
    int* sources;
    long long* edges;
    int* table;
    int table_offset;
};

__device__ __forceinline__ void write_pick(const Result& to, int place, const int* list, long long start, int offset) {
    const int source = list[offset];
    to.sources[place] = source;
    if (to.edges) to.edges[place] = start + offset;
    if (to.table) atomicMin(to.table + source, place + to.table_offset);
}

// One row of more than `fanout` neighbours; `slots` lie in shared memory, or in the result.
template <bool SHARED>
__device__ __forceinline__ void sample_row(
    int* slots, u64 stream, int degree, int fanout, const int* list, long long start, int begin, const Result& to
) {
    const unsigned lane = threadIdx.x;
    for (int slot = lane; slot < fanout; slot += 32) slots[slot] = slot;
    __syncwarp();
    const unsigned end = degree, most = fanout;
    unsigned neighbour = most + lane;
    for (; neighbour + 96 < end; neighbour += 128) {  // four draws at once, none of which waits for another
        unsigned draw[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) draw[i] = draw_below(stream, neighbour + 32 * i, neighbour + 32 * i + 1);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (draw[i] < most) atomicMax(slots + draw[i], int(neighbour + 32 * i));
    }
    for (; neighbour < end; neighbour += 32) {
        const unsigned draw = draw_below(stream, neighbour, neighbour + 1);
        if (draw < most) atomicMax(slots + draw, int(neighbour));
    }
    __syncwarp();
    for (int slot = lane; slot < fanout; slot += 32)
        write_pick(to, begin + slot, list, start, SHARED ? slots[slot] : __ldcg(slots + slot));
    __syncwarp();  // the next row takes the same slots
}

extern "C" __global__ void sample_kernel(
    const Offset* indptr, const int* indices, const int* rows, const int* num_rows, int capacity, const u64* clock,
    int hop, int fanout, const int* out_indptr, int* sources, long long* edges, int has_edges, int* table,
    int has_table, int table_offset, const int* near_lists, const int* near_start, u64* read, int cached,
    const int* order, const int* num_high, int ordered, int threshold, int few, int rows_per_warp
) {
    extern __shared__ int shared_slots[];
    const int lane = threadIdx.x, warp = threadIdx.y, warps = blockDim.y, tasks = warps * rows_per_warp;
    int block = blockIdx.x, base = 0, size = min(*num_rows, capacity);
    if (ordered) {  // blocks of the part of high degrees first
        const int high = *num_high, of_high = (high + tasks - 1) / tasks;
        base = block < of_high ? 0 : high;
        size = block < of_high ? high : size - high;
        block -= block < of_high ? 0 : of_high;
    }
    const int blocks = (size + tasks - 1) / tasks;
    if (block >= blocks) return;
    const Result to = {sources, has_edges ? edges : nullptr, has_table ? table : nullptr, table_offset};

    // Lane t: the warp's row number t.
    long long start = 0;
    const int* list = indices;
    int node = 0, degree = 0, begin = 0;
    int round = lane * warps + warp, place = block * tasks + round;
    if (ordered && size < few) place = round * blocks + (round % 2 ? blocks - 1 - block : block);
    else if (ordered && lane % 2) place += warps - 1 - 2 * warp;
    const bool there = lane < rows_per_warp && place < size;
    if (there) {
        const int row = ordered ? order[base + place] : place;
        node = rows[row];
        start = indptr[node];
        degree = int(indptr[node + 1] - start);
        begin = out_indptr[row];
        list += start;
    }
    if (cached) {
        const int held = there ? near_start[node] : -1;
        if (held >= 0) list = near_lists + held;
        const unsigned all = __ballot_sync(ALL, there), here = __ballot_sync(ALL, held >= 0);
        if (lane == 0) atomicAdd(read, u64(__popc(all)));
        if (lane == 0) atomicAdd(read + 1, u64(__popc(here)));
    }
    u64 key = splitmix(clock[0]);
    key = splitmix(splitmix(splitmix(splitmix(key + clock[1]) + clock[2]) + hop));
    const u64 stream = splitmix(key ^ splitmix(node));

    for (int task = 0; task < rows_per_warp; ++task) {
        const int d = __shfl_sync(ALL, degree, task), b = __shfl_sync(ALL, begin, task);
        const long long s = __shfl_sync(ALL, start, task);
        const int* l = reinterpret_cast<const int*>(__shfl_sync(ALL, reinterpret_cast<u64>(list), task));
        const u64 draws = __shfl_sync(ALL, stream, task);
        if (d <= fanout) {
            for (int slot = lane; slot < d; slot += 32) write_pick(to, b + slot, l, s, slot);
        } else if (d >= threshold) {
            sample_row<true>(shared_slots + warp * fanout, draws, d, fanout, l, s, b, to);
        } else {
            sample_row<false>(sources + b, draws, d, fanout, l, s, b, to);
        }
    }
}
"""


@dataclass(frozen=True)
class PaperLaunch:
    """The paper's parameters, and which of its optimisations are used.

    ``order``: rows ``"sorted"`` by degree, by ``"classes"`` of degrees (one per power of two: two passes instead of a
    sort), or as ``"given"``, without the paper's scheduling. ``degree_threshold``: from this degree on slots lie in
    shared memory. ``block_threshold``: parts of fewer rows are interleaved over all blocks. More than two rows per
    warp make a warp of hubs the last to end (H200, products shape, 200,000 rows in classes: 135 us, 4 warps of 4 183).
    """

    order: str = "sorted"
    degree_threshold: int = 128
    block_threshold: int = 8192
    warps_per_block: int = 8
    rows_per_warp: int = 2


def kernels(indptr: Tensor, device: torch.device) -> Any:
    """The kernels for offsets of the type of ``indptr``, ready for ``device``; the first call compiles them."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return _compiled("int" if indptr.dtype == torch.int32 else "long long", index)


@cache
def _compiled(offset: str, device: int) -> Any:
    try:
        return cuda_kernels(f"typedef {offset} Offset;\n{SOURCE}", device)
    except InputError as error:
        raise InputError(f"sampler='paper': {error}; use sampler='default'") from None


def order_rows(indptr: Tensor, rows: Tensor, num_rows: Tensor, launch: PaperLaunch) -> tuple[Tensor, Tensor]:
    """``(order [S], num_high [1])`` int32: rows by descending degree, those that exist first, and how many reach the
    threshold.
    """
    device, count = rows.device, rows.numel()
    degrees, order = (torch.empty(count, dtype=torch.int32, device=device) for _ in range(2))
    sizes, taken = torch.zeros(2, CLASSES + 1, dtype=torch.int32, device=device)
    grid, block = (-(-count // BLOCK), 1, 1), (BLOCK, 1, 1)
    compiled = kernels(indptr, device)
    compiled.degrees_kernel(grid, block, [indptr, rows, num_rows, count, launch.degree_threshold, degrees, sizes])
    if launch.order == "sorted":
        order = torch.sort(degrees, descending=True).indices.to(torch.int32)
    else:
        compiled.order_kernel(grid, block, [degrees, count, sizes, taken, order])
    return order, sizes[CLASSES:]


def launch_paper(
    indptr: Tensor,
    indices: Tensor,
    rows: Tensor,
    num_rows: Tensor,
    fanout: int,
    clock: Tensor,
    hop: int,
    *,
    edges: bool = False,
    table: Tensor | None = None,
    table_offset: int = 0,
    cached: CachedLists | None = None,
    launch: PaperLaunch | None = None,
) -> HopSample:
    """Sample the first ``num_rows [1]`` of ``rows [S]``: see :func:`weft.ops.sampling.sample_triton.launch_sample`."""
    check_fanout(fanout)
    check_slots(rows.numel(), fanout)
    launch = launch or PaperLaunch()
    out_indptr = count_picks(indptr, rows, num_rows, fanout, replace=False)
    sources = torch.empty(rows.numel() * fanout, dtype=torch.int32, device=rows.device)
    where = torch.empty(sources.numel() if edges else 1, dtype=torch.int64, device=rows.device)
    if rows.numel():
        ordered = launch.order != "given"
        order, high = order_rows(indptr, rows, num_rows, launch) if ordered else (rows, num_rows)
        tasks = launch.warps_per_block * launch.rows_per_warp
        near = (indices, rows, clock) if cached is None else (cached.indices, cached.starts, cached.read)
        kernels(indptr, rows.device).sample_kernel(
            (-(-rows.numel() // tasks) + ordered, 1, 1), (32, launch.warps_per_block, 1),
            [indptr, indices, rows, num_rows, rows.numel(), clock, hop, fanout, out_indptr, sources, where, int(edges),
             sources if table is None else table, int(table is not None), table_offset, *near, int(cached is not None),
             order, high, int(ordered), launch.degree_threshold, launch.block_threshold, launch.rows_per_warp],
            shared_mem=4 * fanout * launch.warps_per_block,
        )  # fmt: skip
    return HopSample(out_indptr, sources, where if edges else None)


def sample_paper(
    indptr: Tensor, indices: Tensor, seeds: Tensor, fanout: int, clock: Tensor, hop: int = 0, **options: Any
) -> HopSample:
    """Sample ``min(fanout, degree)`` in-neighbours of ``seeds [S]`` int32; sizes stay on the device."""
    everyone = torch.full((1,), seeds.numel(), dtype=torch.int32, device=seeds.device)
    return launch_paper(indptr, indices, seeds, everyone, fanout, clock, hop, **options)


# ---- Compile CUDA C++ at run time, with the NVRTC library that comes with torch; nothing is built beforehand.
#
# torch's own ``torch.cuda._compile_kernel`` compiles only where a CUDA toolkit is installed, for headers that these
# kernels do not include. So the compilation is here, and loading and launching are torch's.


@cache
def nvrtc() -> ctypes.CDLL | None:
    """The NVRTC library that torch is installed with, or of the system; None if there is none."""
    for path in _libraries():
        try:
            for builtins in path.parent.glob("libnvrtc-builtins.so.*"):  # NVRTC opens it by its name alone
                ctypes.CDLL(str(builtins))
            library = ctypes.CDLL(str(path))
            library.nvrtcCreateProgram  # noqa: B018  torch's library has it from NVRTC, which it is linked with
        except (OSError, AttributeError):
            continue
        return library
    return None


def _libraries() -> Iterator[Path]:
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}" if torch.version.cuda else "libnvrtc.so.*"
    spec = importlib.util.find_spec("nvidia")  # the packages of CUDA's libraries
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        yield from sorted(Path(folder).glob(f"*/lib/{name}"), reverse=True)
    yield Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"
    yield Path(name.replace(".*", ""))


def compile_cuda(source: str, architecture: str) -> bytes:
    """Binary code of ``source``, whose kernels are ``extern "C"``, for an architecture such as ``"sm_90"``."""
    library = nvrtc()
    if library is None:
        raise InputError("there is no NVRTC library, which compiles kernels in CUDA C++; install nvidia-cuda-nvrtc")

    def text(of: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(library, f"nvrtcGet{of}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(library, f"nvrtcGet{of}")(program, buffer)
        return buffer.raw

    program, options = ctypes.c_void_p(), [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"weft.cu", 0, None, None)
    if library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
        log = text("ProgramLog").rstrip(b"\0").decode().strip()
        raise InputError(f"NVRTC cannot compile for {architecture}: {log.partition(chr(10))[0]}")
    binary = text("CUBIN")
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return binary


def cuda_kernels(source: str, device: int) -> Any:
    """The kernels of ``source`` on GPU number ``device``, by their names.

    They are called with ``grid``, ``block``, ``args`` (tensors on the GPU or in pinned memory, and integers of 32 bits)
    and ``shared_mem``, and run on the current stream, captured or not.
    """
    from torch.cuda._utils import _cuda_load_module

    with torch.cuda.device(device):
        return _cuda_load_module(compile_cuda(source, "sm_{}{}".format(*torch.cuda.get_device_capability(device))))
