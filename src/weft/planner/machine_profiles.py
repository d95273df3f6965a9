"""Named machines to plan for without being on one, and where each of their numbers is from.

``h200`` is what ``weft probe`` measured on one; ``cpu`` is the two-core machine of the CPU benchmarks. The others are
data sheets: capacity, cache, multiprocessors, bandwidth and peak rates are the vendor's, and what no data sheet has
(gathers, what a long copy reaches) is scaled from the H200's measured numbers: from memory by the bandwidth of the data
sheet, from the cache by multiprocessors times clock. ``weft probe`` replaces all of that by what a machine really does.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from weft.core.errors import SpecError
from weft.core.machine import Machine, Rates
from weft.core.suggest import did_you_mean

GB = 10**9
MIB = 2**20

# What a probe found on an H200, to three digits; probes differ by some percent
# (benchmarks/results/estimates_earlier.json has another one whole).
H200_L2_GATHER: Rates = ((64, 6.62e12), (256, 8.17e12), (1024, 8.53e12))
H200_GATHER: Rates = ((64, 2.41e12), (256, 4.05e12), (1024, 4.08e12))
H200_SHEET_BANDWIDTH, H200_COPY = 4.8e12, 4.19e12
H200_PROBE = "measured: `weft probe` on an H200 on 2026-11-15, torch 2.11, CUDA 13.0"
H200_SMS_GHZ = 132 * 1.98

# Of the peak, tall products reach 0.73 (fp32), 0.44 (tf32) and 0.63 (bf16) on the H200; no data sheet says.
DATA_SHEET_MATMUL_SHARE = 0.5

LAUNCH_SECONDS, REPLAY_SECONDS = 9.74e-6, 3.52e-6
OP_SECONDS, CUSTOM_OP_SECONDS = 1.27e-5, 2.13e-4
LAUNCHES = "as measured on the H200 and its host; `weft probe` measures it"

CONTEXT = "about 0.5 GB: CUDA >= 11.7 loads kernels lazily (PyTorch issues 109888, 107667: 0.3 to 0.4 GB, plus ours)"
WORKSPACE = "cuBLAS workspace as PyTorch sets it: 32 MiB on Hopper, 8.125 MiB before (CUDABlas.cpp)"
SCALED = "scaled from the H200's measured rates (weft/planner/machine_profiles.py)"


def data_sheet(
    name: str,
    *,
    memory: float,
    bandwidth: float,
    l2: int,
    sms: int,
    ghz: float,
    flops: tuple[float, float, float],
    pcie: float,
    source: str,
) -> Machine:
    """A GPU by its data sheet; ``flops`` are the dense peaks of fp32, tf32, bf16."""
    by_memory, by_clock = bandwidth / H200_SHEET_BANDWIDTH, sms * ghz / H200_SMS_GHZ
    sheet = dict.fromkeys(("memory_bytes", "l2_bytes", "sms", "flops"), source)
    scaled = dict.fromkeys(("copy_bandwidth", "gather", "l2_gather"), SCALED)
    return Machine(
        name=name,
        device="cuda",
        memory_bytes=int(memory),
        context_bytes=500 * 10**6,
        workspace_bytes=int(8.125 * MIB),
        l2_bytes=l2,
        copy_bandwidth=H200_COPY * by_memory,
        gather=tuple((width, rate * by_memory) for width, rate in H200_GATHER),
        l2_gather=tuple((width, rate * by_clock) for width, rate in H200_L2_GATHER),
        h2d_bandwidth=pcie,
        d2h_bandwidth=pcie,
        flops=dict(zip(("fp32", "tf32", "bf16"), flops, strict=True)),
        matmul_share=DATA_SHEET_MATMUL_SHARE,
        launch_seconds=LAUNCH_SECONDS,
        replay_seconds=REPLAY_SECONDS,
        op_seconds=OP_SECONDS,
        custom_op_seconds=CUSTOM_OP_SECONDS,
        sms=sms,
        sources={
            **sheet,
            **scaled,
            "context_bytes": CONTEXT,
            "workspace_bytes": WORKSPACE,
            "h2d_bandwidth": "about 85 % of the bus's nominal rate, as measured on the H200's",
            "matmul_share": "about as on the H200; `weft probe` measures it",
            **dict.fromkeys(("launch_seconds", "replay_seconds", "op_seconds", "custom_op_seconds"), LAUNCHES),
        },
    )


_H200 = Machine(
    name="h200",
    device="cuda",
    memory_bytes=150_109_880_320,
    context_bytes=784_334_848,
    workspace_bytes=32 * MIB,
    l2_bytes=60 * MIB,
    host_bytes=128 * 2**30,
    copy_bandwidth=H200_COPY,
    gather=H200_GATHER,
    l2_gather=H200_L2_GATHER,
    h2d_bandwidth=55.2 * GB,
    d2h_bandwidth=55.1 * GB,
    flops={"fp32": 48.7e12, "tf32": 219e12, "bf16": 622e12},
    launch_seconds=LAUNCH_SECONDS,
    replay_seconds=REPLAY_SECONDS,
    op_seconds=OP_SECONDS,
    custom_op_seconds=CUSTOM_OP_SECONDS,
    sms=132,
    cores=16,
    sources={
        **dict.fromkeys(("memory_bytes", "l2_bytes", "context_bytes"), H200_PROBE),
        **dict.fromkeys(
            ("copy_bandwidth", "gather", "l2_gather", "h2d_bandwidth", "d2h_bandwidth", "flops"), H200_PROBE
        ),
        **dict.fromkeys(("launch_seconds", "replay_seconds", "op_seconds", "custom_op_seconds"), H200_PROBE),
        "workspace_bytes": WORKSPACE,
    },
)

_PROBED = "measured: `weft probe` on a two-core x86-64 virtual machine, torch 2.13"
_CPU = Machine(
    name="cpu",
    device="cpu",
    memory_bytes=24 * 2**30,
    l2_bytes=32 * MIB,
    host_bytes=24 * 2**30,
    copy_bandwidth=1.2e10,
    gather=((64, 2.8e9), (256, 6.0e9), (1024, 7.5e9)),
    l2_gather=((64, 5.8e9), (256, 2.46e10), (1024, 2.55e10)),
    flops={"fp32": 3.2e10, "tf32": 3.2e10, "bf16": 1.6e9},
    op_seconds=5.2e-6,
    custom_op_seconds=1.05e-4,
    cores=2,
    one_thread=0.6,
    sources={
        **dict.fromkeys(("memory_bytes", "copy_bandwidth", "gather", "l2_gather", "flops", "op_seconds"), _PROBED),
        "one_thread": "assumed; `weft probe` measures it",
    },
)

_TABLE = (
    data_sheet(
        "v100-32g", memory=32 * 2**30, bandwidth=0.9e12, l2=6 * MIB, sms=80, ghz=1.53,
        flops=(15.7e12, 15.7e12, 15.7e12), pcie=13e9,
        source="NVIDIA V100 SXM2 data sheet: 900 GB/s, 80 SMs, 6 MB L2, 15.7 TFLOP/s fp32; no TF32 or BF16 units",
    ),
    data_sheet(
        "a100-40g", memory=42_405_855_232, bandwidth=1.555e12, l2=40 * MIB, sms=108, ghz=1.41,
        flops=(19.5e12, 156e12, 312e12), pcie=27e9,
        source="NVIDIA A100 SXM4 data sheet (1,555 GB/s, 19.5/156/312 TFLOP/s dense); deviceQuery: 42,405,855,232 B",
    ),
    data_sheet(
        "a100-80g", memory=85_000_000_000, bandwidth=2.039e12, l2=40 * MIB, sms=108, ghz=1.41,
        flops=(19.5e12, 156e12, 312e12), pcie=27e9,
        source="NVIDIA A100 SXM4 80 GB data sheet (2,039 GB/s, 19.5/156/312 TFLOP/s dense)",
    ),
    data_sheet(
        "rtx4090", memory=25_250_000_000, bandwidth=1.008e12, l2=72 * MIB, sms=128, ghz=2.52,
        flops=(82.6e12, 82.6e12, 165.2e12), pcie=27e9,
        source="NVIDIA Ada white paper: 1,008 GB/s, 128 SMs, 72 MB L2, 82.6/82.6/165.2 TFLOP/s dense",
    ),
    _H200,
    _CPU,
)  # fmt: skip

PROFILES: Mapping[str, Machine] = MappingProxyType({machine.name: machine for machine in _TABLE})


def profile(name: str) -> Machine:
    """The named machine (letter case does not count)."""
    for known, machine in PROFILES.items():
        if known == name.lower():
            return machine
    hint = did_you_mean(name, PROFILES, count=3, cutoff=0.4) or "known: " + ", ".join(PROFILES)
    raise SpecError(f"there is no machine {name!r}; {hint} (or a JSON file that `weft probe --out FILE` wrote)")


def closest_profile(device_name: str) -> Machine | None:
    """The profile of a GPU by the name its driver gives it: ``"NVIDIA A100-SXM4-40GB"`` is a100-40g."""
    words = device_name.lower().replace("-", " ").replace("_", " ")
    for name, marks in _MARKS.items():
        if all(mark in words for mark in marks):
            return PROFILES[name]
    return None


_MARKS = {
    "h200": ("h200",),
    "a100-40g": ("a100", "40gb"),
    "a100-80g": ("a100", "80gb"),
    "v100-32g": ("v100", "32gb"),
    "rtx4090": ("4090",),
}
