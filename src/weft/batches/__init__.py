"""Sampled training: seeds, neighbour sampling, blocks, feature stores, and the pipeline that overlaps them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.core.startup import lazy_names

if TYPE_CHECKING:
    from weft.batches.block import Block, MiniBatch, Subgraph, from_pyg
    from weft.batches.cache import BenefitDensity, ByDegree, ByPresampling, CacheChoice, CachePolicy
    from weft.batches.features import FeatureStore
    from weft.batches.pipeline import Pipeline, Stage, training_stages
    from weft.batches.sampler import NeighbourSampler, SeedBatch, SeedOrder


__all__ = [
    "BenefitDensity",
    "Block",
    "ByDegree",
    "ByPresampling",
    "CacheChoice",
    "CachePolicy",
    "FeatureStore",
    "MiniBatch",
    "NeighbourSampler",
    "Pipeline",
    "SeedBatch",
    "SeedOrder",
    "Stage",
    "Subgraph",
    "from_pyg",
    "training_stages",
]

_NAMES = {
    "block": ("Block", "MiniBatch", "Subgraph", "from_pyg"),
    "cache": ("BenefitDensity", "ByDegree", "ByPresampling", "CacheChoice", "CachePolicy"),
    "features": ("FeatureStore",),
    "pipeline": ("Pipeline", "Stage", "training_stages"),
    "sampler": ("NeighbourSampler", "SeedBatch", "SeedOrder"),
}
_PLACES = {name: f"weft.batches.{module}" for module, names in _NAMES.items() for name in names}
__getattr__, __dir__ = lazy_names(__name__, _PLACES)
