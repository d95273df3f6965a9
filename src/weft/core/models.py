"""ModelTraits: one row per named model with all that planning and running need besides its layers.

The classes behind the names are in ``weft.nn.models``. A user's model has a row and a class while a
``with weft.nn.register_model(traits, cls):`` block runs, or from an entry point in ``weft.models``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from weft.core.errors import SpecError
from weft.core.plugins import load_plugin

GNN_SETTINGS = ("hidden", "layers", "dropout", "input_dropout", "norm", "residual")  # what weft.nn.models.GNN takes


@dataclass(frozen=True)
class ModelTraits:
    """What Weft knows of a named model without building it.

    ``settings``: the settings of a task that it reads, by name; any other that a task gives is refused.
    ``shaping``: those of them that change which operators a step has, beyond the depth, norm and residuals.
    ``has_heads``: ``hidden`` is the width of ``heads`` heads together. ``first_layer``: why the first aggregation
    changes from step to step ("": it does not, and may be computed once). ``padding``: why a narrow member cannot be
    padded with zeros to the width of a wide one ("": it can, unless ``norm="layer"`` or it has blocks).
    ``relational``: it reads the relations of edges, and is built for their number. ``weighted``: whether it reads
    their weights; None: not known.

    The rest is for rules of thumb, per layer: ``operators`` by kind, forward and backward together (``spmm``,
    ``attention``, ``attention_v2``, ``matmul``, ``pointwise``), ``launches`` of kernels, ``linear_maps``,
    ``sparse_passes`` over the edges, ``norms``, and ``kept``, the bytes saved for the backward pass
    as a multiple of a GCN's.
    """

    name: str
    settings: tuple[str, ...] = GNN_SETTINGS
    shaping: tuple[str, ...] = ()
    has_heads: bool = False
    first_layer: str = ""
    padding: str = ""
    relational: bool = False
    weighted: bool | None = None
    operators: Mapping[str, int] = field(default_factory=lambda: {"spmm": 2, "matmul": 3, "pointwise": 2}, hash=False)
    launches: int = 8
    linear_maps: int = 1
    sparse_passes: int = 2
    norms: int = 1
    kept: float = 1.0


_HEADS = {
    "settings": (*GNN_SETTINGS, "heads", "out_heads", "attention_dropout"),
    "shaping": ("heads", "out_heads"),
    "has_heads": True,
    "weighted": False,
    "first_layer": "attention depends on the weights",
}
BUILT_IN: Mapping[str, ModelTraits] = MappingProxyType(
    {
        traits.name: traits
        for traits in (
            ModelTraits("gcn", weighted=True),
            ModelTraits(
                "sage",
                weighted=False,
                settings=(*GNN_SETTINGS, "aggregator"),
                shaping=("aggregator",),
                operators={"spmm": 2, "matmul": 5, "pointwise": 2},
                launches=10,
                linear_maps=2,
            ),
            ModelTraits(
                "gin",
                weighted=False,
                operators={"spmm": 2, "matmul": 6, "pointwise": 4},
                launches=14,
                linear_maps=2,
                norms=2,
                kept=1.35,
            ),
            ModelTraits(
                "gat",
                **_HEADS,  # type: ignore[arg-type]
                operators={"attention": 2, "matmul": 3, "pointwise": 2},
                launches=12,
                sparse_passes=4,
                kept=2.05,
            ),
            ModelTraits(
                "gatv2",
                **_HEADS,  # type: ignore[arg-type]
                operators={"attention_v2": 2, "matmul": 5, "pointwise": 2},
                launches=14,
                linear_maps=2,
                sparse_passes=5,
                kept=1.85,
            ),
            ModelTraits(
                "rgcn",
                weighted=False,
                settings=(*GNN_SETTINGS, "bases", "blocks"),
                shaping=("bases", "blocks"),
                relational=True,
                operators={"spmm": 6, "matmul": 6, "pointwise": 4},
                launches=18,
                sparse_passes=4,
                kept=0.75,
            ),
        )
    }
)
MODELS = tuple(BUILT_IN)  # the names of the built-in models

# Those of the blocks that run and of plug-ins that were used, each with its class.
_REGISTERED: dict[str, tuple[ModelTraits, Any]] = {}


def traits_of(model: Any) -> ModelTraits | None:
    """The row of a named model; None for any other object, which is a user's model."""
    if not isinstance(model, str):
        return None
    if model not in BUILT_IN and model not in _REGISTERED and isinstance(row := _plugin(model), tuple):
        _REGISTERED[model] = row
    return BUILT_IN[model] if model in BUILT_IN else _REGISTERED.get(model, (None, None))[0]


def import_path(name: str) -> str:
    """``"module:callable"`` of a model that a plug-in adds without a row; ``name`` itself for any other."""
    model = _plugin(name)
    return name if model is None or isinstance(model, tuple) else f"{model.__module__}:{model.__qualname__}"


def _plugin(name: str) -> Any:
    """What the entry point ``name`` in ``weft.models`` is: None, a row with its class, or a callable."""
    model = load_plugin("models", name) if name.isidentifier() else None
    row = isinstance(model, tuple) and len(model) == 2 and isinstance(model[0], ModelTraits)
    if model is None or (row and model[0].name == name) or (callable(model) and hasattr(model, "__qualname__")):
        return model
    raise SpecError(
        f"model={name!r}: the entry point in weft.models must be a class or function, or a pair "
        f"(weft.nn.ModelTraits({name!r}, ...), class), not {model!r}"
    )


def model_names() -> tuple[str, ...]:
    """The names that have a row here: the built-in ones, then registered ones."""
    return (*BUILT_IN, *_REGISTERED)


def registered_classes() -> dict[str, Any]:
    """The classes of the registered models by name."""
    return {name: model for name, (_, model) in _REGISTERED.items()}


@contextmanager
def with_traits(traits: ModelTraits, model: Any = None) -> Iterator[None]:
    """Know ``traits`` and the class ``model`` inside the ``with`` block; see ``weft.nn.register_model``."""
    name = traits.name
    if not name.isidentifier():
        raise SpecError(f"model name {name!r} must be a word of letters, digits and underscores, such as 'my_gcn'")
    if name in model_names():
        raise SpecError(f"model name {name!r} is taken; choose another")
    _REGISTERED[name] = traits, model
    try:
        yield
    finally:
        del _REGISTERED[name]
