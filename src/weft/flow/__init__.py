"""Sampled training: seeds, neighbour sampling, blocks, feature stores, and the pipeline that overlaps them."""

from typing import TYPE_CHECKING

from weft.core.lazy.names import lazy_names

if TYPE_CHECKING:
    from weft.flow.features.cache_policy import BenefitDensity, ByDegree, ByPresampling, CacheChoice, CachePolicy
    from weft.flow.features.feature_store import FeatureStore
    from weft.flow.sampling.batch import MiniBatch, Subgraph
    from weft.flow.sampling.block import Block
    from weft.flow.sampling.pyg_batch import from_pyg
    from weft.flow.sampling.sampler import NeighbourSampler
    from weft.flow.sampling.seeds import SeedBatch, SeedOrder
    from weft.flow.stages.pipeline import Pipeline, Stage
    from weft.flow.stages.training_stages import training_stages

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
    "BenefitDensity": "weft.flow.features.cache_policy",
    "Block": "weft.flow.sampling.block",
    "ByDegree": "weft.flow.features.cache_policy",
    "ByPresampling": "weft.flow.features.cache_policy",
    "CacheChoice": "weft.flow.features.cache_policy",
    "CachePolicy": "weft.flow.features.cache_policy",
    "FeatureStore": "weft.flow.features.feature_store",
    "MiniBatch": "weft.flow.sampling.batch",
    "NeighbourSampler": "weft.flow.sampling.sampler",
    "Pipeline": "weft.flow.stages.pipeline",
    "SeedBatch": "weft.flow.sampling.seeds",
    "SeedOrder": "weft.flow.sampling.seeds",
    "Stage": "weft.flow.stages.pipeline",
    "Subgraph": "weft.flow.sampling.batch",
    "from_pyg": "weft.flow.sampling.pyg_batch",
    "training_stages": "weft.flow.stages.training_stages",
}
__getattr__, __dir__ = lazy_names(__name__, _PLACES)
