"""Sampled training: seeds, neighbour sampling, blocks, feature stores, and the pipeline that overlaps them."""

from typing import TYPE_CHECKING

from weft.core.lazy.names import lazy_names

if TYPE_CHECKING:
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

_PLACES = {
    "BenefitDensity": "weft.flow.cache_policy",
    "Block": "weft.flow.block",
    "ByDegree": "weft.flow.cache_policy",
    "ByPresampling": "weft.flow.cache_policy",
    "CacheChoice": "weft.flow.cache_policy",
    "CachePolicy": "weft.flow.cache_policy",
    "FeatureStore": "weft.flow.feature_store",
    "MiniBatch": "weft.flow.batch",
    "NeighbourSampler": "weft.flow.sampler",
    "Pipeline": "weft.flow.pipeline",
    "SeedBatch": "weft.flow.seeds",
    "SeedOrder": "weft.flow.seeds",
    "Stage": "weft.flow.pipeline",
    "Subgraph": "weft.flow.batch",
    "from_pyg": "weft.flow.pyg_batch",
    "training_stages": "weft.flow.training_stages",
}
__getattr__, __dir__ = lazy_names(__name__, _PLACES)
