"""Phase times for tests of divisions."""

from __future__ import annotations

from weft.core.division import Operator, PhaseTime, PhaseTimes, built_in

REGISTRY = built_in()


def times(host=4.0, dma=1.0, sample=1.0, uva=1.0, train=1.0, **more) -> PhaseTimes:
    """Seconds of the five phases."""
    phases = {
        "batching_cpu": PhaseTime(host),
        "transfer_pcie": PhaseTime(dma),
        "batching_gpu": PhaseTime(sample),
        "transfer_gpu": PhaseTime(uva),
        "training_gpu": PhaseTime(train),
    }
    return PhaseTimes(phases, **more)


def with_npu(batching: bool = True):
    """The built-in operators and those of an accelerator that Weft does not know."""
    train = Operator("training", "npu", "fake training", ("npu",))
    if not batching:
        return REGISTRY.registered(train)
    own = Operator("batching", "npu", "fake sampling", ("npu",))
    read = Operator("transfer", "npu", "fake reads over the bus", ("npu", "pcie"))
    return REGISTRY.registered(train, own, read)
