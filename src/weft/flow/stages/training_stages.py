"""The stages of sampled training as a list: sample, fetch, transfer; seeds go in, training takes what comes out."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.flow.device import exact_device
from weft.flow.features.feature_store import FeatureStore
from weft.flow.sampling.batch import MiniBatch, Subgraph
from weft.flow.sampling.sampler import NeighbourSampler
from weft.flow.sampling.seeds import SeedBatch
from weft.flow.stages.pipeline import Stage
from weft.flow.stages.streams import on_stream


def training_stages(
    sampler: NeighbourSampler,
    store: FeatureStore,
    labels: Tensor | None = None,
    device: torch.device | str = "cpu",
    workers: int = 1,
) -> list[Stage]:
    """From a :class:`SeedBatch` to a batch on ``device`` with features and labels.

    ``labels [N]`` or ``[N, C]``; ``workers`` threads sample when the CPU does. On a GPU each stage has its own stream.
    """
    device = exact_device(device)

    def sample(seeds: SeedBatch) -> MiniBatch | Subgraph:
        return sampler.sample(seeds.seeds, seeds.epoch, seeds.batch)

    def fetch(batch: MiniBatch | Subgraph) -> MiniBatch | Subgraph:
        y = None if labels is None else labels[batch.seeds.to(labels.device).long()]
        return batch.with_data(store.read(batch.input_nodes), y)

    def transfer(batch: MiniBatch | Subgraph) -> MiniBatch | Subgraph:
        return batch.to(device, non_blocking=True)

    return [
        Stage("sample", on_stream(sample, sampler.device), workers if sampler.backend == "cpu" else 1),
        Stage("fetch", on_stream(fetch, store.device)),
        Stage("transfer", on_stream(transfer, device)),
    ]
