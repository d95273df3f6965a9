"""Sampled training: seeds, neighbour sampling, blocks, feature stores, and the pipeline that overlaps them."""

from weft.flow.batch import MiniBatch, Subgraph
from weft.flow.block import Block
from weft.flow.cache_policy import BenefitDensity, ByDegree, ByPresampling, CacheChoice, CachePolicy
from weft.flow.feature_store import FeatureStore
from weft.flow.pipeline import Pipeline, Stage
from weft.flow.pyg_batch import from_pyg
from weft.flow.sampler import NeighbourSampler
from weft.flow.seeds import SeedBatch, SeedOrder
from weft.flow.training_stages import training_stages

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
