"""Sampled training: seeds, neighbour sampling, blocks, feature stores, and the pipeline that overlaps them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.core.startup import lazy_names

if TYPE_CHECKING:
    from weft.batches.block import Block as Block
    from weft.batches.block import MiniBatch as MiniBatch
    from weft.batches.block import Subgraph as Subgraph
    from weft.batches.block import from_pyg as from_pyg
    from weft.batches.cache import BenefitDensity as BenefitDensity
    from weft.batches.cache import ByDegree as ByDegree
    from weft.batches.cache import ByPresampling as ByPresampling
    from weft.batches.cache import CacheChoice as CacheChoice
    from weft.batches.cache import CachePolicy as CachePolicy
    from weft.batches.features import FeatureStore as FeatureStore
    from weft.batches.pipeline import Pipeline as Pipeline
    from weft.batches.pipeline import Stage as Stage
    from weft.batches.pipeline import training_stages as training_stages
    from weft.batches.sampler import NeighbourSampler as NeighbourSampler
    from weft.batches.sampler import SeedBatch as SeedBatch
    from weft.batches.sampler import SeedOrder as SeedOrder

_MODULES = {
    "weft.batches.block": ("Block", "MiniBatch", "Subgraph", "from_pyg"),
    "weft.batches.cache": ("BenefitDensity", "ByDegree", "ByPresampling", "CacheChoice", "CachePolicy"),
    "weft.batches.features": ("FeatureStore",),
    "weft.batches.pipeline": ("Pipeline", "Stage", "training_stages"),
    "weft.batches.sampler": ("NeighbourSampler", "SeedBatch", "SeedOrder"),
}
__getattr__, __dir__, __all__ = lazy_names(__name__, _MODULES)
