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

_PLACES = {
    "BenefitDensity": "weft.batches.cache",
    "Block": "weft.batches.block",
    "ByDegree": "weft.batches.cache",
    "ByPresampling": "weft.batches.cache",
    "CacheChoice": "weft.batches.cache",
    "CachePolicy": "weft.batches.cache",
    "FeatureStore": "weft.batches.features",
    "MiniBatch": "weft.batches.block",
    "NeighbourSampler": "weft.batches.sampler",
    "Pipeline": "weft.batches.pipeline",
    "SeedBatch": "weft.batches.sampler",
    "SeedOrder": "weft.batches.sampler",
    "Stage": "weft.batches.pipeline",
    "Subgraph": "weft.batches.block",
    "from_pyg": "weft.batches.block",
    "training_stages": "weft.batches.pipeline",
}
__getattr__, __dir__ = lazy_names(__name__, _PLACES)
