"""Named machines to plan for without access to one, with the source of every number.

The GPU of ``h200`` is what ``weft probe`` measured on one; ``cpu`` is the two-core machine of the CPU benchmarks. The
other GPUs are data sheets: capacity, cache, multiprocessors, bandwidth and peak rates are the vendor's, and what no
data sheet has (gathers, what a long copy reaches) is scaled from the H200's measured numbers: from memory by the
bandwidth of the data sheet, from the cache by multiprocessors times clock. Without units for a precision its rate is
that of fp32.

Hosts of GPUs are assumed: the 16 cores and 128 GiB of the H200's, with the rates per core of ``cpu``. ``weft probe``
replaces all of that by what a machine really does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from weft.core.errors import SpecError
from weft.core.machine import Device, Host, Link, Machine
from weft.core.wording import did_you_mean

GB = 10**9
MIB = 2**20

H200_PROBE = "measured: `weft probe` on an H200 on 2026-11-15, torch 2.11, CUDA 13.0"
H200_SHEET_BANDWIDTH, H200_SMS_GHZ = 4.8e12, 132 * 1.98

# Of the peak, tall products reach 0.73 (fp32), 0.44 (tf32) and 0.63 (bf16) on the H200; no data sheet says.
DATA_SHEET_MATMUL_SHARE = 0.5
LAUNCHES = "as measured on the H200 and its host; `weft probe` measures it"

CONTEXT = "about 0.5 GB: CUDA >= 11.7 loads kernels lazily (PyTorch issues 109888, 107667: 0.3 to 0.4 GB, plus ours)"
WORKSPACE = "cuBLAS workspace as PyTorch sets it: 32 MiB on Hopper, 8.125 MiB before (CUDABlas.cpp)"
SCALED = "scaled from the H200's measured rates (weft/planner/machine_profiles.py)"

PROBED_CPU = "measured: `weft probe` on a two-core x86-64 virtual machine, torch 2.13"
BUS = "about 85 % of the bus's nominal rate, as measured on the H200's"
BUS_LATENCY = "; latency: as the launch of a kernel"
ASSUMED_DISK = (
    "assumed: less than the 5 GB/s and more that data sheets of PCIe 4.0 NVMe drives say; `weft probe` measures it"
)

_CPU_HOST = Host(
    memory_bytes=24 * 2**30,
    l2_bytes=32 * MIB,
    copy_bandwidth=1.2e10,
    gather=((64, 2.8e9), (256, 6.0e9), (1024, 7.5e9)),
    l2_gather=((64, 5.8e9), (256, 2.46e10), (1024, 2.55e10)),
    flops={"fp32": 3.2e10, "tf32": 3.2e10, "bf16": 1.6e9},
    op_seconds=5.2e-6,
    custom_op_seconds=1.05e-4,
    cores=2,
    one_thread=0.6,
    sources={
        **dict.fromkeys(
            ("memory_bytes", "l2_bytes", "copy_bandwidth", "gather", "l2_gather", "flops", "op_seconds", "cores"),
            PROBED_CPU,
        ),
        "custom_op_seconds": PROBED_CPU,
        "one_thread": "assumed; `weft probe` measures it",
    },
)


def assumed_host(cores: int, memory: int, source: str) -> Host:
    """A host of which only ``cores`` and ``memory`` are known: every core as fast as one of the ``cpu`` profile."""
    times = cores / _CPU_HOST.cores
    scaled = "assumed: the rates per core of the `cpu` profile; `weft probe` measures it"
    copied = "assumed: as of the `cpu` profile; `weft probe` measures it"
    return replace(
        _CPU_HOST,
        memory_bytes=memory,
        copy_bandwidth=_CPU_HOST.copy_bandwidth * times,
        gather=tuple((width, rate * times) for width, rate in _CPU_HOST.gather),
        l2_gather=tuple((width, rate * times) for width, rate in _CPU_HOST.l2_gather),
        flops={precision: rate * times for precision, rate in _CPU_HOST.flops.items()},
        cores=cores,
        one_thread=min(_CPU_HOST.one_thread / times, 1.0),
        sources={
            **dict.fromkeys(("cores", "memory_bytes"), source),
            **dict.fromkeys(("copy_bandwidth", "gather", "l2_gather", "flops", "one_thread"), scaled),
            **dict.fromkeys(("l2_bytes", "op_seconds", "custom_op_seconds"), copied),
        },
    )


_DISK = Link("disk", "disk", "host", 3 * GB, 1e-4, ASSUMED_DISK)
_HOST = assumed_host(16, 128 * 2**30, "the host of the H200 that was probed; others may have more or less")


# What a probe found on an H200, to three digits; probes differ by some percent
# (benchmarks/results/estimates.json has another one whole).
_H200_GPU = Device(
    name="h200",
    memory_bytes=150_109_880_320,
    context_bytes=784_334_848,
    workspace_bytes=32 * MIB,
    l2_bytes=60 * MIB,
    copy_bandwidth=4.19e12,
    gather=((64, 2.41e12), (256, 4.05e12), (1024, 4.08e12)),
    l2_gather=((64, 6.62e12), (256, 8.17e12), (1024, 8.53e12)),
    flops={"fp32": 48.7e12, "tf32": 219e12, "bf16": 622e12},
    launch_seconds=9.74e-6,
    replay_seconds=3.52e-6,
    op_seconds=1.27e-5,
    custom_op_seconds=2.13e-4,
    sms=132,
    sources={
        **dict.fromkeys(("memory_bytes", "l2_bytes", "context_bytes", "sms"), H200_PROBE),
        **dict.fromkeys(("copy_bandwidth", "gather", "l2_gather", "flops"), H200_PROBE),
        **dict.fromkeys(("launch_seconds", "replay_seconds", "op_seconds", "custom_op_seconds"), H200_PROBE),
        "workspace_bytes": WORKSPACE,
        "matmul_share": "1: the rates of products are measured",
    },
)


def bus(to_device: float, to_host: float, source: str) -> tuple[Link, ...]:
    """Both directions between the host and its first GPU, and the disk."""
    return (
        Link("pcie", "host", "gpu:0", to_device, _H200_GPU.launch_seconds, source + BUS_LATENCY),
        Link("pcie", "gpu:0", "host", to_host, _H200_GPU.launch_seconds, source + BUS_LATENCY),
        _DISK,
    )


@dataclass(frozen=True)
class DataSheet:
    """The data sheet of a GPU; ``flops`` are the dense peaks of fp32, tf32, bf16."""

    name: str
    memory: float
    bandwidth: float
    l2: int
    sms: int
    ghz: float
    flops: tuple[float, float, float]
    pcie: float
    source: str
    workspace: float = 8.125 * MIB

    def machine(self, host: Host = _HOST) -> Machine:
        """The GPU in ``host``."""
        by_memory, by_clock = self.bandwidth / H200_SHEET_BANDWIDTH, self.sms * self.ghz / H200_SMS_GHZ
        gpu = replace(
            _H200_GPU,
            name=self.name,
            memory_bytes=int(self.memory),
            context_bytes=500 * 10**6,
            workspace_bytes=int(self.workspace),
            l2_bytes=self.l2,
            copy_bandwidth=_H200_GPU.copy_bandwidth * by_memory,
            gather=tuple((width, rate * by_memory) for width, rate in _H200_GPU.gather),
            l2_gather=tuple((width, rate * by_clock) for width, rate in _H200_GPU.l2_gather),
            flops=dict(zip(("fp32", "tf32", "bf16"), self.flops, strict=True)),
            matmul_share=DATA_SHEET_MATMUL_SHARE,
            sms=self.sms,
            sources={
                **dict.fromkeys(("memory_bytes", "l2_bytes", "sms", "flops"), self.source),
                **dict.fromkeys(("copy_bandwidth", "gather", "l2_gather"), SCALED),
                "context_bytes": CONTEXT,
                "workspace_bytes": WORKSPACE,
                "matmul_share": "about as on the H200; `weft probe` measures it",
                **dict.fromkeys(("launch_seconds", "replay_seconds", "op_seconds", "custom_op_seconds"), LAUNCHES),
            },
        )
        return Machine(self.name, host, (gpu,), bus(self.pcie, self.pcie, BUS))


_H200 = Machine("h200", _HOST, (_H200_GPU,), bus(55.2 * GB, 55.1 * GB, H200_PROBE))
_CPU = Machine("cpu", _CPU_HOST, (), (_DISK,))

_SHEETS = (
    DataSheet(
        "v100-32g", memory=32 * 2**30, bandwidth=0.9e12, l2=6 * MIB, sms=80, ghz=1.53,
        flops=(15.7e12, 15.7e12, 15.7e12), pcie=13e9,
        source="NVIDIA V100 SXM2 data sheet: 900 GB/s, 80 SMs, 6 MB L2, 15.7 TFLOP/s fp32; no TF32 or BF16 units",
    ),
    DataSheet(
        "a100-40g", memory=42_405_855_232, bandwidth=1.555e12, l2=40 * MIB, sms=108, ghz=1.41,
        flops=(19.5e12, 156e12, 312e12), pcie=27e9,
        source="NVIDIA A100 SXM4 data sheet (1,555 GB/s, 19.5/156/312 TFLOP/s dense); deviceQuery: 42,405,855,232 B",
    ),
    DataSheet(
        "a100-80g", memory=85_000_000_000, bandwidth=2.039e12, l2=40 * MIB, sms=108, ghz=1.41,
        flops=(19.5e12, 156e12, 312e12), pcie=27e9,
        source="NVIDIA A100 SXM4 80 GB data sheet (2,039 GB/s, 19.5/156/312 TFLOP/s dense)",
    ),
    DataSheet(
        "rtx4090", memory=25_250_000_000, bandwidth=1.008e12, l2=72 * MIB, sms=128, ghz=2.52,
        flops=(82.6e12, 82.6e12, 165.2e12), pcie=27e9,
        source="NVIDIA Ada white paper: 1,008 GB/s, 128 SMs, 72 MB L2, 82.6/82.6/165.2 TFLOP/s dense",
    ),
    DataSheet(
        "t4", memory=14_930 * MIB, bandwidth=0.32e12, l2=4 * MIB, sms=40, ghz=1.59,
        flops=(8.1e12, 8.1e12, 8.1e12), pcie=13e9,
        source="NVIDIA T4 data sheet (320 GB/s, 8.1 TFLOP/s fp32; no TF32 or BF16 units), TU104: 40 SMs, 4 MB L2; "
        "least total_memory that PyTorch reports for one: 14,930 MiB",
    ),
    DataSheet(
        "a10", memory=22_260 * MIB, bandwidth=0.6e12, l2=6 * MIB, sms=72, ghz=1.695,
        flops=(31.2e12, 62.5e12, 125e12), pcie=27e9,
        source="NVIDIA A10 data sheet (24 GB, 600 GB/s, 31.2/62.5/125 TFLOP/s dense), GA102: 72 SMs, 6 MB L2; "
        "of 24 GiB the share that PyTorch reports of an L40S's 48",
    ),
    DataSheet(
        "l40s", memory=45_589 * MIB, bandwidth=0.864e12, l2=48 * MIB, sms=142, ghz=2.52,
        flops=(91.6e12, 183e12, 362e12), pcie=27e9,
        source="NVIDIA L40S data sheet (864 GB/s, 91.6/183/362 TFLOP/s dense), AD102: 142 SMs, at least 48 MB L2; "
        "total_memory by PyTorch: 45,589 MiB",
    ),
    DataSheet(
        "h100", memory=81_082 * MIB, bandwidth=3.35e12, l2=50 * MIB, sms=132, ghz=1.98,
        flops=(66.9e12, 494.7e12, 989.4e12), pcie=55e9, workspace=32 * MIB,
        source="NVIDIA H100 SXM5 data sheet (3.35 TB/s, 66.9/494.7/989.4 TFLOP/s dense), 132 SMs, 50 MB L2; "
        "total_memory by PyTorch: 81,082 MiB",
    ),
)  # fmt: skip

PROFILES: Mapping[str, Machine] = MappingProxyType(
    {machine.name: machine for machine in (*(sheet.machine() for sheet in _SHEETS), _H200, _CPU)}
)


def profile(name: str) -> Machine:
    """The named machine (letter case does not count)."""
    if name.lower() in PROFILES:
        return PROFILES[name.lower()]
    longer = [profile_name for profile_name in PROFILES if name and profile_name.startswith(name.lower())]
    hint = did_you_mean(name, longer or PROFILES, count=3, cutoff=0.0 if longer else 0.4)
    hint = hint or "known: " + ", ".join(PROFILES)
    raise SpecError(f"there is no machine {name!r}; {hint} (or a JSON file that `weft probe --out FILE` wrote)")


def closest_profile(device_name: str) -> Machine | None:
    """The profile of a GPU by the name its driver gives it: ``"NVIDIA A100-SXM4-40GB"`` is a100-40g."""
    words = set(device_name.lower().replace("-", " ").replace("_", " ").split())
    for name, marks in _MARKS.items():
        if words.issuperset(marks):
            return PROFILES[name]
    return None


_MARKS = {
    "h200": ("h200",),
    "h100": ("h100", "hbm3"),
    "a100-40g": ("a100", "40gb"),
    "a100-80g": ("a100", "80gb"),
    "v100-32g": ("v100", "32gb"),
    "l40s": ("l40s",),
    "a10": ("a10",),
    "t4": ("t4",),
    "rtx4090": ("4090",),
}
