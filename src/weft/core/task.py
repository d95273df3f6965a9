"""Task: what to train. Flat, frozen, plain data (except a graph or module given as an object)."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import wraps
from typing import Any

from weft.core.errors import SpecError
from weft.core.models import ModelTraits, import_path, model_names, traits_of
from weft.core.search_space import Choice, Range
from weft.core.settings import (
    Callback,
    Hop,
    Rule,
    check_group_settings,
    choice,
    number_in,
    object_name,
    open_choice,
    plain_hop,
    read_arguments,
    read_betas,
    read_callbacks,
    read_class_weights,
    read_fanout,
    read_param_groups,
    read_plateau,
    setting,
)
from weft.core.wording import brief, did_you_mean

MOST = 10_000_000  # of anything that is counted: beyond is a slip of the keyboard, and not even a history would fit
MOST_KEPT = 100  # epochs whose weights are kept: each takes as much memory as the weights
OPTIMIZER_SETTINGS = {"momentum": ("sgd",), "betas": ("adam", "adamw"), "eps": ("adam", "adamw")}  # and who uses them
OPTIMIZER_GIVEN = ("lr", "weight_decay", *OPTIMIZER_SETTINGS)  # what a class of torch.optim is given if it takes it
OWN_FUNCTIONS = ("optimizer", "schedule", "objective", "metric")  # settings that may be functions of the user's own
LOOP_SETTINGS = ("optimizer_args", "plateau", "patience", "huber_delta", "warmup", "label_smoothing", "class_weights")
SAMPLING_SETTINGS = frozenset({"fanout", "batch", "batch_seed"})
ALL_SPLITS = "all"  # of the graph
GRAPHS = "a name, a path, a weft.Graph, or a Data or dataset of PyG"  # what a graph is given as
LATEST = "last"  # as ``select``: the latest evaluation is the best
FIT = "fit"  # a batch that is as large as fits, which the plan decides
ALIASES = {  # PyG's names, which are read as Weft's: a task, its results and its plans have the latter alone
    "learning_rate": "lr",
    "num_neighbors": "fanout",
    "batch_size": "batch",
    "hidden_channels": "hidden",
    "num_layers": "layers",
}
ELSEWHERE = {  # what else other libraries call a setting: an error that names Weft's
    "fanouts": "fanout",
    "hidden_dim": "hidden",
    "hidden_size": "hidden",
    "num_hidden": "hidden",
    "n_layers": "layers",
    "num_heads": "heads",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "drop": "dropout",
    "dropout_rate": "dropout",
    "criterion": "objective",
    "loss": "objective",
    "loss_fn": "objective",
    "scheduler": "schedule",
    "lr_scheduler": "schedule",
    "early_stopping": "patience",
    "monitor": "select",
    "gradient_clip_val": "clip_norm",
    "accumulate_grad_batches": "accumulate",
    "wd": "weight_decay",
    "l2": "weight_decay",
    "aggr": "aggregator",
    "num_bases": "bases",
    "num_blocks": "blocks",
    "random_seed": "seed",
    "dataset": "graph",
    "data": "graph",
}
USUAL_FANOUT = (15, 10, 5)  # of the hops from the seeds outwards, as GraphSAGE's examples have them
MAX_LAYERS = 10_000  # each is built and dry-run before planning ends, a thousand in some 15 s on one core


@dataclass(frozen=True)
class Task:
    """One training: a graph, a model, and how to train it. Every field is checked on construction.

    ``graph`` is a name (``"cora"``), a path, a :class:`weft.Graph`, or a ``Data`` or dataset of PyG. ``model`` is the
    name of a model (``"gcn"``), ``"module:callable"`` or ``"file.py:callable"``, an ``nn.Module``, or a callable
    ``(in_features, out_features, ...) -> nn.Module`` (or ``in_channels``, ``out_channels``, as PyG's classes have
    them). A callable is given those model settings that the task gives and whose names its signature has, and all of
    ``model_args``; keywords that are no settings of a task, but may be its arguments, are added to ``model_args``. A
    setting that nothing reads is an error when the task is run or planned. The names in :data:`ALIASES` are read as
    Weft's own. ``init="fresh"`` draws new weights, by the seed, for an ``nn.Module`` given as an object.
    """

    graph: Any = field(default=None, hash=False)  # a Data of PyG has no hash
    model: Any = "gcn"

    layers: int = setting(2, int, low=1, high=MAX_LAYERS, section="model")
    hidden: int = setting(64, int, low=1, high=MOST, section="model")  # width of a hidden layer, all heads together
    heads: int = setting(8, int, low=1, high=MOST, section="model")  # gat, gatv2
    out_heads: int = setting(1, int, low=1, high=MOST, section="model")  # gat, gatv2: averaged in the last layer
    dropout: float = setting(0.5, float, low=0, below=1, section="model")
    input_dropout: float | None = setting(None, float, low=0, below=1, section="model")  # None: not at all
    attention_dropout: float | None = setting(None, float, low=0, below=1, section="model")  # None: dropout
    norm: str | None = choice(None, "batch", "layer", section="model")
    residual: bool = setting(False, bool, section="model")
    aggregator: str = choice("mean", "mean", "max", "sum", section="model")  # sage
    bases: int | None = setting(None, int, low=1, high=MOST, section="model")  # rgcn: matrices that relations mix
    blocks: int | None = setting(None, int, low=1, high=MOST, section="model")  # rgcn: blocks of block-diagonal ones
    init: str | None = choice(None, "fresh", section="model")  # None: a module given as an object keeps its weights
    model_args: dict[str, Any] = field(default_factory=dict, hash=False)  # for the model, by names of its own

    optimizer: Any = open_choice("adam", "adam", "adamw", "sgd")  # or a class of torch.optim, or what makes one
    optimizer_args: dict[str, Any] = setting(dict, dict, parse=read_arguments)  # of a torch.optim class
    param_groups: dict[str, dict[str, Any]] = setting(dict, dict, parse=read_param_groups)  # by pattern of names
    lr: float = setting(0.01, float, above=0)
    weight_decay: float = setting(0.0, float, low=0)
    decay: str = choice("all", "all", "first")  # which layers weight_decay reaches; the GCN paper: first
    betas: tuple[float, float] = setting((0.9, 0.999), tuple, parse=read_betas)
    eps: float = setting(1e-8, float, above=0)
    momentum: float = setting(0.0, float, low=0, below=1)  # sgd
    schedule: Any = open_choice("constant", "constant", "cosine", "linear", "step", "plateau")  # or (epoch) -> factor
    plateau: dict[str, Any] = setting(dict, dict, parse=read_plateau)  # of schedule="plateau"
    warmup: int = setting(0, int, low=0, high=MOST)  # epochs of linear warm-up before the schedule
    epochs: int = setting(200, int, low=1, high=MOST)  # the history of all of them has its place from the start
    patience: int | None = setting(None, int, low=1, high=MOST)  # epochs without a better value of ``select``
    select: str | None = setting(None, str)  # the column that decides the best epoch; None: the validation metric
    keep_top: int | None = setting(None, int, low=1, high=MOST_KEPT)  # weights of so many best epochs; None: the best
    eval_every: int = setting(1, int, low=1, high=MOST)
    clip_norm: float | None = setting(None, float, above=0)  # of a task's whole gradient
    clip_value: float | None = setting(None, float, above=0)  # of every number of it
    accumulate: int = setting(1, int, low=1, high=MOST)  # steps per update
    ema: float | None = setting(None, float, low=0, below=1)  # decay of the averaged weights, which are evaluated
    callbacks: tuple[Callback, ...] = setting(tuple, tuple, parse=read_callbacks)
    objective: Any = open_choice("auto", "auto", "multiclass", "multilabel", "mse", "mae", "huber")
    metric: Any = open_choice("auto", "auto", "accuracy", "f1_micro", "f1_macro", "roc_auc", "mse", "mae", "r2")
    precision: str = choice("fp32", "fp32", "tf32", "bf16")
    label_smoothing: float = setting(0.0, float, low=0, below=1)
    # Multiclass: one number per class, or "balanced".
    class_weights: str | tuple[float, ...] | None = setting(None, tuple, parse=read_class_weights)
    huber_delta: float = setting(1.0, float, above=0)  # huber: where it goes from squares to a straight line
    convert: bool | None = setting(None, bool)  # layers of PyG compute with Weft's operators: if nothing changes

    mode: str = choice("auto", "auto", "full", "sampled")  # the whole graph in every step, or sampled batches of it
    # Sampled: neighbours per hop (and relation), seeds outwards; -1: all.
    fanout: tuple[Hop, ...] | None = setting(None, tuple, parse=read_fanout)
    # Sampled: training nodes per step; "fit": as many as fit, a power of two.
    batch: Any = setting(1024, int, low=1, high=MOST, accepts=lambda value: isinstance(value, str) and value == FIT)
    batch_seed: int = setting(0, int, low=0, below=2**62)  # sampled: of the order of batches and of all draws

    feature_norm: str | None = choice(None, "row", section="")  # every node's features divided by their sum
    # Which of the graph's splits; "all": a run makes a sweep over them; None: the first.
    split: int | str | None = setting(
        None,
        int,
        low=0,
        section="",
        accepts=lambda value: isinstance(value, str) and value == ALL_SPLITS,
        described=f"the number of one of the graph's splits, from 0, or {ALL_SPLITS!r}",
    )
    seed: int = setting(0, int, low=0, below=2**62, section="")
    name: str | None = setting(None, str, section="")

    def __post_init__(self) -> None:
        where = f"task {self.label!r}: "
        if self.graph is None or self.graph == "" or isinstance(self.graph, (int, float, list, dict)):
            raise SpecError(f'{where}graph={brief(self.graph)} must be {GRAPHS}, such as graph="cora"')
        if hasattr(self.graph, "__fspath__"):
            object.__setattr__(self, "graph", str(self.graph))
        if isinstance(self.model, str):
            if self.traits is None:
                object.__setattr__(self, "model", import_path(self.model))
            if self.traits is None and (":" not in self.model or self.model.startswith("<")):
                suggestion = did_you_mean(self.model, model_names())
                raise SpecError(
                    f"{where}model={self.model!r} must be one of {', '.join(model_names())}, "
                    f'or "module:callable" for a model of your own{f"; {suggestion}" if suggestion else ""}'
                )
        elif not callable(self.model):
            raise SpecError(
                f"{where}model={self.model!r} must be a name, an nn.Module, or a callable "
                "(in_features, out_features) -> nn.Module"
            )
        object.__setattr__(self, "model_args", read_arguments(self.model_args, f"{where}model_args"))
        for name in self.model_args:
            if name in model_settings():
                raise SpecError(f"{where}{name} is a setting of its own; give {name}=, not model_args")
        for name, rule in rules().items():
            if name != "norm" or self.traits is not None:  # PyG's classes also take "batch_norm" or "GraphNorm"
                object.__setattr__(self, name, rule.check(where, name, getattr(self, name)))
        self._check_loop(where)
        traits = self.traits
        if traits is not None and traits.has_heads and self.layers > 1 and self.hidden % self.heads:
            raise SpecError(
                f"{where}hidden={self.hidden} must be a multiple of heads={self.heads}: it is the width of all heads "
                "together"
            )
        if traits is not None and self.blocks is not None and not self.ignores("blocks"):
            if self.bases is not None:
                raise SpecError(
                    f"{where}bases={self.bases} and blocks={self.blocks} are two ways to share weights between "
                    "relations; give one of them"
                )
            if self.layers > 1 and self.hidden % self.blocks:
                raise SpecError(
                    f"{where}hidden={self.hidden} must be a multiple of blocks={self.blocks}: the blocks are equal "
                    "parts of it"
                )

    @property
    def given(self) -> frozenset[str]:
        """The names of the settings that were given, rather than left at their defaults."""
        given: frozenset[str] = self._given  # type: ignore[attr-defined]
        return given

    @property
    def sampled(self) -> bool:
        """Whether it trains on sampled batches: by its mode, or because it sets how to sample."""
        return self.mode == "sampled" or (self.mode == "auto" and bool(self.given & SAMPLING_SETTINGS))

    @property
    def fanouts(self) -> tuple[Hop, ...]:
        """Neighbours per hop: as given, or one of the usual numbers per layer."""
        if self.fanout is not None:
            return self.fanout
        return tuple(USUAL_FANOUT[min(hop, len(USUAL_FANOUT) - 1)] for hop in range(self.layers))

    @property
    def traits(self) -> ModelTraits | None:
        """What Weft knows of the model by its name; None for a model of the user's own."""
        return traits_of(self.model)

    def given_to_model(self) -> tuple[str, ...]:
        """The model settings that were given, in the order of the fields; ``init`` is Weft's own business."""
        return tuple(name for name in model_settings() if name in self.given)

    def ignores(self, name: str) -> bool:
        """Whether the setting ``name`` has no effect, as far as names show: a user's model may read any."""
        return self.why_ignored(name) is not None

    def has_own(self, name: str) -> bool:
        """Whether ``objective``, ``metric``, ``optimizer`` or ``schedule`` is a function of the user's own."""
        return is_own(getattr(self, name))

    def why_ignored(self, name: str) -> str | None:
        """Why a setting has no effect, as far as names show; None if it has one."""
        users = OPTIMIZER_SETTINGS.get(name, ())
        if users and not self.has_own("optimizer") and self.optimizer not in users:
            return f"{self.optimizer} does not use {name}, {' and '.join(users)} do{'es' * (len(users) == 1)}"
        if name in SAMPLING_SETTINGS and self.mode == "full":
            return f"mode='full' trains on the whole graph; leave {name} out, or set mode='sampled'"
        if name == "optimizer_args" and not self.has_own("optimizer"):
            return f"{self.optimizer} has settings of its own names; leave it out, or give a class of torch.optim"
        if name == "plateau" and self.schedule != "plateau":
            return f"schedule={name_of(self.schedule)} does not read it; set schedule='plateau'"
        if name == "huber_delta" and self.objective != "huber":
            return f"objective={name_of(self.objective)} does not read it; set objective='huber'"
        if name == "patience" and self.select == LATEST:
            return f"select={LATEST!r} takes the weights of the latest evaluation; leave it out"
        if name == "warmup" and self.has_own("schedule"):
            return "the schedule is a function of your own, which says the rate of every epoch"
        if name in ("label_smoothing", "class_weights") and self.has_own("objective"):
            return "the objective is a function of your own, which computes the loss by itself"
        if name == "convert" and self.traits is not None:
            return f"{self.model} has no layers of PyG; leave it out"
        if self.traits is not None and name in model_settings() and name not in self.traits.settings:
            return f"{self.model} has no {name}; leave it out"
        return None

    @property
    def label(self) -> str:
        """What messages call this task: its name, or its model's."""
        return self.name if isinstance(self.name, str) and self.name else self.model_name

    @property
    def model_name(self) -> str:
        """The model's name: as given, or the class of the object."""
        return self.model if isinstance(self.model, str) else object_name(self.model)

    @property
    def graph_name(self) -> str:
        """The graph's name: as given, or the name that the object carries."""
        if isinstance(self.graph, str):
            return self.graph
        return str(getattr(self.graph, "name", None) or type(self.graph).__name__)

    def with_values(self, **changes: Any) -> Task:
        """The same task with some fields changed, checked again."""
        values = {name: getattr(self, name) for name in self.given}
        if "model_args" in values:
            values["model_args"] = {name: value for name, value in self.model_args.items() if name not in changes}
        return Task(**{**values, **with_own_names(changes, f"task {self.label!r}")})

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; a graph or model given as an object becomes a description of it."""
        data = {f.name: plain_value(getattr(self, f.name)) for f in fields(self)}
        data["fanout"] = None if self.fanout is None else [plain_hop(hop) for hop in self.fanout]
        data["mode"] = "sampled" if self.sampled else self.mode
        if not isinstance(self.graph, str):
            data["graph"] = f"<{self.graph_name}>"
        given = self.given_to_model() if self.traits is None else ()  # what its model was built with
        if self.has_own("optimizer"):
            given = (*given, *(name for name in OPTIMIZER_GIVEN if name in self.given))
        if self.traits is None or self.has_own("optimizer"):
            data["given"] = list(given)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Task:
        """The inverse of :meth:`to_dict`, for tasks whose graph and model have names."""
        data = with_own_names(data, "task")
        given = data.pop("given", None)
        reject_unknown(data, f"task {data.get('name') or data.get('model', 'gcn')!r}")
        if data.get("mode", "sampled") != "sampled":  # nothing reads them, and setting them would select it
            data = {name: value for name, value in data.items() if name not in SAMPLING_SETTINGS}
        if given is not None:
            unless_given = set(model_settings() if traits_of(data.get("model", "gcn")) is None else ())
            unless_given |= set(OPTIMIZER_GIVEN if is_own(data.get("optimizer", "adam")) else ())
            data = {name: value for name, value in data.items() if name in given or name not in unless_given}
        return cls(**data)

    def _check_loop(self, where: str) -> None:
        if not self.has_own("optimizer"):
            check_group_settings(self.label, self.param_groups)
        if self.clip_norm is not None and self.clip_value is not None:
            raise SpecError(f"{where}clip_norm and clip_value are two ways to clip; give one of them")
        if self.keep_top is not None and self.select == LATEST:
            raise SpecError(f"{where}keep_top={self.keep_top} needs a column that ranks epochs, not select={LATEST!r}")
        if self.warmup >= self.epochs:
            raise SpecError(
                f"{where}warmup={self.warmup} must be below epochs={self.epochs}, or nothing is left to train at the "
                "full rate"
            )
        fanout, traits = self.fanout, self.traits
        if fanout is None or traits is None:
            return
        if len(fanout) != self.layers:
            raise SpecError(
                f"{where}fanout={list(map(plain_hop, fanout))} has {len(fanout)} hops for layers={self.layers}; "
                "give one number per layer"
            )
        if not traits.relational and not all(isinstance(hop, int) for hop in fanout):
            raise SpecError(
                f"{where}fan-outs per relation are for models that read relations, such as rgcn; {self.model} takes "
                "one number per hop"
            )


def _reading(initialise: Callable[..., None]) -> Callable[..., None]:
    """``Task.__init__`` that also takes PyG's names and arguments of the model, and notes what was given."""
    names = [f.name for f in fields(Task)]

    @wraps(initialise)
    def init(task: Task, *values: Any, **settings: Any) -> None:
        positional = dict(zip(names, values, strict=False))
        settings = with_model_args(settings, [{**positional, **settings}.get("model", "gcn")], "task")
        object.__setattr__(task, "_given", frozenset((*positional, *settings)))  # the rest are defaults
        initialise(task, *values, **settings)

    return init


Task.__init__ = _reading(Task.__init__)  # type: ignore[method-assign]


def with_own_names(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Settings by Weft's own names, in the same order; a :class:`SpecError` for one that is given twice."""
    for alias in ALIASES.keys() & settings.keys():
        if ALIASES[alias] in settings:
            raise SpecError(f"{where}: {alias} is another name of {ALIASES[alias]}; give one of them")
    return {ALIASES.get(name, name): value for name, value in settings.items()}


def with_model_args(settings: Mapping[str, Any], models: Iterable[Any], where: str) -> dict[str, Any]:
    """Settings by Weft's own names, those that are arguments of one of ``models`` in ``model_args``.

    A :class:`SpecError` for a name that is neither.
    """
    settings, models = with_own_names(settings, where), list(models)
    own = {f.name for f in fields(Task)}
    args = {name: value for name, value in settings.items() if name not in own}
    reject_unknown([name for name in args if not any(may_have(model, name) for model in models)], where)
    if not args:
        return settings
    written = read_arguments(settings.get("model_args", {}), f"{where}: model_args")
    for name in args.keys() & written.keys():
        raise SpecError(f"{where}: {name} is given by itself and in model_args; give it once")
    return {name: value for name, value in settings.items() if name in own} | {"model_args": {**written, **args}}


def may_have(model: Any, name: str) -> bool:
    """Whether ``model`` may have an argument ``name``; of one that is in a file, its signature says so later."""
    if isinstance(model, str):
        return ":" in model
    is_built = hasattr(model, "named_parameters") and not isinstance(model, type)
    return callable(model) and not is_built and takes(model, name)


def takes(make: Callable[..., Any], name: str) -> bool:
    """Whether ``make`` can be given ``name``."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(parameter.name == name or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def rules() -> dict[str, Rule]:
    """The rule of every field that has one, by field name."""
    return {f.name: f.metadata["rule"] for f in fields(Task) if "rule" in f.metadata}


def model_settings() -> tuple[str, ...]:
    """The settings that shape a model, by name; ``init`` says how its weights begin, not what it is."""
    return tuple(name for name, rule in rules().items() if rule.section == "model" and name != "init")


def plain_value(value: Any) -> Any:
    """The value of a setting for JSON: a class as where it can be imported from, another object as a description."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): plain_value(item) for name, item in value.items()}
    if isinstance(value, (Range, Choice, Callback)):
        return value.to_dict()
    if (number := number_in(value)) is not value:
        return number
    if hasattr(value, "__fspath__"):
        return str(value)
    module, name = getattr(value, "__module__", "__main__"), getattr(value, "__qualname__", "")
    importable = isinstance(value, type) and getattr(sys.modules.get(module), name, None) is value
    return f"{module}:{name}" if importable and module != "__main__" else f"<{name_of(value)}>"


def is_own(value: Any) -> bool:
    """Whether the value of one of :data:`OWN_FUNCTIONS` is a function, or names one."""
    return not isinstance(value, str) or ":" in value


def name_of(value: Any) -> str:
    """What a setting is called: a word as it is, a function by its name."""
    return value if isinstance(value, str) else object_name(value)


def reject_unknown(data: Iterable[str], where: str) -> None:
    """A :class:`SpecError` for the first key that is no field of :class:`Task`."""
    known = [f.name for f in fields(Task)]
    for key in data:
        if key not in known:
            raise SpecError(f"{where}: unknown setting {key!r}; {meant(key, known)}")


def meant(name: str, known: Iterable[str]) -> str:
    """Which setting of ``known`` an unknown ``name`` means: what other libraries call so, or the closest one."""
    own = ELSEWHERE.get(name.rpartition(".")[2])
    target = next((setting for setting in known if own is not None and setting.rpartition(".")[2] == own), None)
    hint = f"did you mean {target!r}?" if target else did_you_mean(name, known)
    return hint or "docs/api.md lists the settings of a task; what only your own model reads goes in model_args"
