"""RunOptions: how a run is done. One table of rules, from which runs, plans, queues and the shell take options.

``Task`` says what is trained. An option that nothing would read is refused, in one sentence.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any

from weft.core.compatibility import alone_reason, group_key, stack_key, width
from weft.core.division import STRATEGIES
from weft.core.errors import SpecError
from weft.core.gpus import check_device_name
from weft.core.placement import PLACES, POLICIES, SAMPLERS
from weft.core.plugins import plugin_names
from weft.core.settings import SHARDED_KERNELS, Rule
from weft.core.task import FIT, Task
from weft.core.units import parse_bytes
from weft.core.wording import nearest_names, option

CHECKPOINT_SECONDS = 30.0
ORDERS = ("given", "degree", "bfs", "rcm", "metis")
PEERS = ("auto", "ipc", "symmetric", "nvshmem")
PREPARES = ("name", "registry", "preparers")  # what hardware that prepares batches has
LOGGERS = {  # where each writes (in brackets: may be left out), and what makes it, in weft.engine.loggers
    "tensorboard": ("DIR", "tensorboard:TensorboardLogger"),
    "wandb": ("[PROJECT]", "wandb:WandbLogger"),
    "mlflow": ("[URI]", "mlflow:MlflowLogger"),
    "trackio": ("[PROJECT]", "wandb:TrackioLogger"),
    "csv": ("FILE", "tables:CsvLogger"),
    "parquet": ("FILE", "tables:ParquetLogger"),
    "logging": ("[NAME]", "logging:records_to"),
}
MOST_TRIALS = 10_000  # more are a slip of the keyboard
MAX_MEMBERS = 256  # of a group: beyond, one failure costs too many tasks their group
TUNERS = ("random", "asha", "hyperband", "halving", "pbt")
TUNES = ("ask", "report", "stop", "tell")  # what a tuner of the user's own has
STUDIES = ("ask", "tell", "sampler", "pruner", "directions")  # what a study of Optuna has
WEAVES = ("off", "concurrent", "merged", "merged+push")


def run_option(
    default: Any,
    kind: type,
    help: str = "",
    readers: str = "run queue",
    metavar: str = "",
    shown: str = "",
    **limits: Any,
) -> Any:
    """A field with a :class:`Rule`, read by ``readers``.

    ``help``, ``metavar`` and ``shown`` (the default in words) are for a shell, which cannot give it without ``help``.
    """
    rule = Rule(kind, section="", optional=default is None, **limits)
    shell = {"help": help, "metavar": metavar or None, "shown": shown or None}
    return field(default=default, metadata={"rule": rule, "shell": shell, "readers": readers.split()})


def parse_division(value: Any, name: str) -> str | float:
    """A strategy, or a share of the GPU; a :class:`SpecError` for anything else."""
    share = math.nan
    if not isinstance(value, bool):
        with suppress(TypeError, ValueError):
            share = float(value)
    if 0.0 <= share <= 1.0:
        return share
    if value not in STRATEGIES:
        raise SpecError(
            f"{option(name, value)} must be {' or '.join(map(repr, STRATEGIES))}, or the share of the batches that the "
            "GPU prepares, from 0 to 1"
        )
    return str(value)


def parse_log(value: Any, name: str) -> tuple[str, ...]:
    """One ``"KIND:WHERE"`` or several; a :class:`SpecError` for a kind that is not there, or that lacks its place."""
    specs = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(specs, (list, tuple)) or not all(isinstance(spec, str) for spec in specs):
        raise SpecError(f"{option(name, value)} must be text such as 'csv:metrics.csv', or a list of such")
    for spec in specs:
        kind, _, where = spec.partition(":")
        if kind not in LOGGERS and kind not in (added := plugin_names("loggers")):
            kinds = [f"{kind}:{needs}".replace(":[", "[:") for kind, (needs, _) in LOGGERS.items()]
            hint = nearest_names(kind, (*LOGGERS, *added))
            raise SpecError(f"{option(name, spec)}{hint} must be one of {', '.join((*kinds, *added))}")
        needs = LOGGERS.get(kind, ("[]",))[0]
        if not where and not needs.startswith("["):
            raise SpecError(f"{option(name, spec)} must say where: {kind}:{needs}")
    twice = next((spec for spec in specs if specs.count(spec) > 1), None)
    if twice is not None:
        raise SpecError(f"{option(name, twice)} is given twice; leave one of them out")
    return tuple(specs)


class _Options:
    """A table of options: checks every field by its rule and knows which were given."""

    def __post_init__(self) -> None:
        for row in fields(self):  # type: ignore[arg-type]
            if "rule" in row.metadata:
                value = row.metadata["rule"].check("", row.name, getattr(self, row.name))
                object.__setattr__(self, row.name, value)

    @property
    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults, by name; those of a placement under their own names."""
        changed: dict[str, Any] = {}
        for row in fields(self):  # type: ignore[arg-type]
            value = getattr(self, row.name)
            if isinstance(value, Placement):
                changed |= value.given
            elif value is not row.default and value != row.default:
                changed[row.name] = value
        return changed


@dataclass(frozen=True)
class Placement(_Options):
    """Where the features and the edges (``topology``) of sampled training lie; None leaves a choice to the plan.

    On the ``"gpu"``, in pinned ``"host"`` memory, there with the most used of them ``"cached"`` on the GPU, or on
    ``"disk"``, in the files of a saved graph; None: the first of these that fits into the budget. ``cache``: bytes of
    the device for the cache (``"2GiB"``; None: what is left of the budget). ``cache_policy``: what it holds, by
    ``"degree"``, ``"presampling"`` or ``"benefit"``, or an object with a ``choose`` method
    (:class:`weft.batches.CachePolicy`). ``division``: how batches are divided between the host and the GPU:
    ``"elastic"`` (the default: the host prepares as many as arrive in time), ``"fixed"`` (MorphGL's algorithms at the
    ratio of Equation 6), or a number from 0 to 1, the fixed share of the GPU. ``overlap``: the GPU samples and fetches
    the next batch on a stream of its own while it trains on the current one, and the host prepares none. ``sampler``:
    what draws neighbours on a GPU, all uniformly without replacement: ``"default"`` (as many draws as picks),
    ``"reservoir"`` (a draw per neighbour, atomics in global memory) or ``"paper"`` (the same picks by TurboGNN's
    algorithm in CUDA C++).
    """

    # fmt: off
    features: str | None = run_option(
        None, str,
        "Sampled training: where features are kept: gpu, host (pinned), cached (host, the most used also on the GPU) "
            "or disk (a saved graph's files).",
        "run plan queue", shown="the first that fits", choices=PLACES,
    )
    topology: str | None = run_option(
        None, str, "Where edges are kept; the same choices.", "run plan queue", shown="the first that fits",
        choices=PLACES,
    )
    cache: int | None = run_option(
        None, int, "Of the device, for the cache: 2GiB.", "run plan queue", "BYTES", "what the budget leaves",
        parse=parse_bytes,
    )
    cache_policy: Any = run_option(
        None, str, f"What the cache holds, by: {', '.join(POLICIES)}.", "run plan queue",
        shown="degree, benefit for edges", choices=POLICIES,
        accepts=lambda value: callable(getattr(value, "choose", None)), described="an object with a choose method",
    )
    division: str | float | None = run_option(
        None, str, "How batches are divided between host and GPU; a number: the share of the GPU.", "run plan queue",
        "elastic|fixed|SHARE", "elastic", parse=parse_division,
    )
    overlap: bool = run_option(
        False, bool, "Sample and fetch the next batch on the GPU while it trains on the current one.",
        "run plan queue",
    )
    sampler: str = run_option(
        "default", str, f"What draws neighbours on a GPU: {', '.join(SAMPLERS)} (TurboGNN's).", "run plan queue",
        choices=SAMPLERS,
    )
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampler != "default" and self.division is not None:
            raise SpecError(
                f"{option('sampler', self.sampler)} draws other neighbours than the host, which prepares batches with "
                f"{option('division', self.division)}; give one of the two"
            )
        extra = "cache" if self.cache is not None else "cache_policy" if self.cache_policy is not None else ""
        if extra and self.features is not None and "cached" not in (self.features, self.topology):
            needs, features = option("features", "cached"), option("features", self.features)
            raise SpecError(f"{option(extra)} needs {needs}, not {features}")
        if self.overlap and self.division is not None:
            raise SpecError(
                f"{option('overlap', True)} does not go with {option('division', self.division)}: the GPU prepares all "
                "batches by itself; leave one of the two out"
            )
        if self.overlap and "disk" in (self.features, self.topology):
            raise SpecError(f"{option('overlap', True)} would have no effect: the CPU reads batches from disk")

    @property
    def user_policy(self) -> object | None:
        """The user's own cache policy, if one was given."""
        return None if isinstance(self.cache_policy, str) else self.cache_policy


@dataclass(frozen=True)
class RunOptions(_Options):
    """How a run is done; every field is checked on construction. ``device``, ``budget``, ``ranks`` and ``placement``
    can also be given to :func:`weft.run` by themselves.

    ``device``: ``"auto"`` (the GPU if there is one), ``"cpu"``, ``"cuda"``, ``"cuda:1"``. ``budget``: bytes that it may
    take on the device (``"24GiB"``; None: what is free there); what cannot keep within is refused before it begins.
    ``ranks``: how many processes share the graph, each with about as many edges: GPUs of this host (``device="cuda"``),
    one GPU (``"cuda:0"``) or the CPU. This process is one of them. A checkpoint of some ranks is resumed by any number.
    ``placement``: where the data of sampled training lies. ``prune``: end members of a sweep that are not worth
    training on: ``"median"``, or a policy such as :class:`weft.MedianPruner`. ``tuner``: train the trials of a search
    over the settings of a sweep, chosen by ``"random"``, ``"asha"``, ``"hyperband"``, ``"halving"``, ``"pbt"``, a
    :class:`weft.Tuner` or a study of Optuna: ``trials`` in all, ``width`` at once (None: what fills the device).
    ``checkpoint_every``: seconds of training between checkpoints.
    ``weave``: how stacks of different structure share a GPU: ``"off"`` (one group after another), ``"concurrent"`` (on
    streams of their own), ``"merged"`` (one step with shared kernels, which takes up to half a minute to compile) or
    ``"merged+push"`` (the same with TurboMGNN's pull-and-push; equal to rounding); None: concurrently if they do not
    fill the GPU. ``compile``: let Inductor fuse what lies between Weft's operators, in users' modules above all; None:
    on a GPU, if the plan expects it to repay.
    ``order``: renumber the nodes before they are spread over ranks, so that fewer edges cross between them:
    ``"degree"``, ``"bfs"``, ``"rcm"`` or ``"metis"``; the numbers are those of the renumbered graph on one rank.
    ``peers``: the memory that ranks on GPUs read each other's rows from: ``"ipc"`` (CUDA IPC), ``"symmetric"`` (torch's
    symmetric memory) or ``"nvshmem"`` (the same on NVSHMEM's heap), the last two with a GPU per rank.
    ``sharded``: how ranks on GPUs sum rows that lie with others: ``"tiles"`` (copied while local rows are summed),
    ``"interleaved"`` (read by the kernel that sums local rows meanwhile, as MGG does), ``"staged"`` (copied in chunks
    meanwhile) or ``"fetched"`` (all of them first); None: the fastest, which is searched for on large graphs.
    ``log``: where epochs, settings and results of every member are also written: ``"tensorboard:DIR"``,
    ``"csv:FILE"``, ... or a list of them (docs/tracking.md).
    ``batches``: a loader that makes the batches of a task with ``mode="sampled"``, such as PyG's ``NeighborLoader``.
    ``hardware``: what prepares batches of sampled training in addition to the host's threads, with ``name``,
    ``registry()`` and ``preparers(parts)`` (docs/division.md); None: the GPU, if features or edges lie in host memory.
    """

    # fmt: off
    device: str = run_option(
        "auto", str, "auto (a GPU if there is one), cpu, cuda, cuda:N.", "run cluster",
        parse=lambda value, _: check_device_name(str(value)),
    )
    prune: Any = run_option(
        None, str, "End members of a sweep that are not worth training on: median.", shown="none",
        choices=("median",), accepts=callable,
        described="a callable (epoch, scores, running) -> names, such as weft.MedianPruner()",
    )
    tuner: Any = run_option(
        None, str, f"Train the trials of a search, chosen by: {', '.join(TUNERS)}.", "tune plan", shown="none",
        choices=TUNERS,
        accepts=lambda value: (
            value in plugin_names("tuners")
            if isinstance(value, str) and value not in TUNERS
            else any(all(hasattr(value, name) for name in names) for names in (TUNES, STUDIES))
            ),
        described="an object with the methods of weft.Tuner (ask, report, stop and tell), or a study of Optuna",
    )
    trials: int | None = run_option(None, int, "Trials of the search in all.", "tune plan", low=1, high=MOST_TRIALS)
    width: int | None = run_option(
        None, int, "How many trials train at once.", "tune plan", shown="what fills the device and fits", low=1,
        high=MAX_MEMBERS,
    )
    budget: int | None = run_option(
        None, int, "Memory it may take, such as 24GiB.", "run plan cluster queue", "BYTES",
        "what is free on the device", parse=parse_bytes,
    )
    weave: str | None = run_option(
        None, str,
        "How tasks of different structure share a GPU: one after another, concurrent, or merged into one step.",
        "run plan queue", "off|concurrent|merged|merged+push", "concurrent if they do not fill it", choices=WEAVES,
    )
    compile: bool | None = run_option(
        None, bool, "Compile steps with Inductor, or never.", "run plan queue",
        shown="on a GPU, if predicted to pay off",
    )
    ranks: int = run_option(1, int, "Split the graph over this many processes on --device.", "run queue cluster", low=1)
    placement: Placement = Placement()
    order: str = run_option(
        "given", str, f"With --gpus or --ranks: renumber the nodes first: {', '.join(ORDERS)}.", choices=ORDERS,
    )
    peers: str = run_option(
        "auto", str, "With --gpus: memory that ranks read each other's rows from: ipc, symmetric, nvshmem.",
        choices=PEERS,
    )
    sharded: str | None = run_option(
        None, str, f"With --gpus: how rows of other ranks are summed: {', '.join(SHARDED_KERNELS)}.", "run queue",
        shown="the fastest on large graphs, else fetched", choices=SHARDED_KERNELS,
    )
    checkpoint_every: float = run_option(
        CHECKPOINT_SECONDS, float, "Seconds of training between checkpoints.", "run cluster queue", "SECONDS", low=0,
    )
    log: tuple[str, ...] = run_option(
        (), tuple,
        "Also log to: tensorboard:DIR, wandb[:PROJECT], mlflow[:URI], trackio[:PROJECT], csv:FILE, parquet:FILE, "
            "logging[:NAME]; repeat.",
        "run", "KIND[:WHERE]", "none", parse=parse_log,
    )
    batches: Any = run_option(
        None, type(None), readers="run", accepts=lambda value: hasattr(value, "__iter__"),
        described="a loader of batches, such as PyG's NeighborLoader",
    )
    hardware: Any = run_option(
        None, type(None), readers="run", accepts=lambda value: all(hasattr(value, name) for name in PREPARES),
        described="an object with name, registry() and preparers(parts)",
    )
    # fmt: on

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.placement, Placement):
            raise SpecError(f"placement={self.placement!r} must be a weft.Placement(...)")

    @classmethod
    def of(cls, **options: Any) -> RunOptions:
        """Options by their names, those of a placement included."""
        placed = {row.name: options.pop(row.name) for row in fields(Placement) if row.name in options}
        return cls(**options, placement=Placement(**placed)) if placed else cls(**options)

    def with_keywords(self, **keywords: Any) -> RunOptions:
        """The same with what was given to a function by itself; a :class:`SpecError` for what was given twice."""
        defaults = RunOptions()
        changed = {name: value for name, value in keywords.items() if value != getattr(defaults, name)}
        for name, value in changed.items():
            if getattr(self, name) != getattr(defaults, name):
                raise SpecError(f"{name}={value!r}: options= has {name}={getattr(self, name)!r}; give one of the two")
        return replace(self, **changed) if changed else self

    def refuse_unread(self, reader: str, words: str) -> None:
        """A :class:`SpecError` for the first option that ``reader`` does not read; ``words`` say why."""
        for name, value in self.given.items():
            if name not in (row.name for row in options_of(reader)):
                raise SpecError(f"{option(name, value[0] if isinstance(value, tuple) else value)} {words}")

    @property
    def for_queue(self) -> dict[str, Any]:
        """The given options as plain data to submit; a :class:`SpecError` for one that cannot be submitted."""
        self.refuse_unread("queue", "cannot be submitted: a server chooses the device and is sent settings alone")
        for name, value in self.given.items():
            if not isinstance(value, (str, int, float)):
                raise SpecError(f"{option(name, value)} is an object, which cannot be sent; give a name")
        return self.given

    @property
    def for_plan(self) -> dict[str, Any]:
        """The given options that change a plan."""
        return {row.name: self.given[row.name] for row in options_of("plan") if row.name in self.given}

    def for_group(self, tasks: Sequence[Task]) -> RunOptions:
        """The same for some of the tasks that they were given for, without options about other tasks."""
        weave = self.weave if self._weave_matters(tasks) else None
        return replace(self, prune=self.prune if len(tasks) > 1 else None, weave=weave)

    def check_tasks(self, tasks: Sequence[Task]) -> None:
        """A :class:`SpecError` for options that exclude each other or these ``tasks``, or that nothing would read."""
        given, ranks, label = self.given, option("ranks", self.ranks), tasks[0].label
        waits, memory = "ranks wait for each other inside of a step", "every rank has its part of the graph in its own"
        apart = {"weave": waits, "compile": waits, **dict.fromkeys(self.placement.given, f"{memory} memory")}
        apart |= dict.fromkeys(("batches", "hardware"), "batches are then made for a run in one process")
        for name, value in given.items():
            shown = f"{name}=" if name in ("batches", "hardware") else option(name, value)
            if self.ranks == 1 and name in ("order", "peers", "sharded"):
                several = option("ranks", 2)
                raise SpecError(f"{shown} is of use over several ranks only; give {several} or more, or leave it out")
            if self.ranks > 1 and name in apart and value is not False:
                raise SpecError(f"{shown} does not go with {ranks}: {apart[name]}; leave one of the two out")
            if name in ("batches", "hardware") and self.placement.sampler != "default":
                sampler = option("sampler", self.placement.sampler)
                raise SpecError(f"{sampler} makes the batches on the GPU, and {shown} elsewhere; give one of the two")
        if self.sharded is not None and not any(_sums_over_ranks(task) for task in tasks):
            raise SpecError(
                f"{option('sharded', self.sharded)} would have no effect: none of these tasks sums rows of the whole "
                "graph (attentions, maxima and sampled batches copy remote rows first); leave it out"
            )
        unread = [name for name in ("trials", "width") if name in given and self.tuner is None]
        if unread:
            raise SpecError(f"{option(unread[0], given[unread[0]])} would have no effect without {option('tuner')}")
        if self.prune is not None and len(tasks) == 1:
            raise SpecError(f"{option('prune')} would have no effect: {label!r} has no other task to be compared with")
        if self.hardware is not None and self.batches is not None:
            raise SpecError("hardware= prepares batches of Weft's own sampler, not those of batches=; give one of them")
        if self.hardware is not None and not any(task.sampled for task in tasks):
            raise SpecError(f"task {label!r}: hardware= would have no effect; only mode='sampled' has batches")
        for task in tasks:
            where = f"task {task.label!r}: "
            if task.batch == FIT and (self.ranks > 1 or self.batches is not None):
                other = ranks if self.ranks > 1 else "batches="
                raise SpecError(
                    f"{where}batch='fit' is decided for one device and its sampler, not with {other}: give a number"
                )
            if self.batches is not None and (not task.sampled or task.fanout is None):
                raise SpecError(f"{where}batches= needs mode='sampled' with the loader's own fanout and batch")
            for name in ("batch_seed", "feature_norm") if self.batches is not None else ():
                if name in task.given:
                    raise SpecError(f"{where}{name} has no effect on batches=, which the loader makes")

    def check_device(self, kind: str) -> None:
        """A :class:`SpecError` for options that a run on devices of ``kind`` would not read."""
        lie = "needs a GPU; on a CPU they lie in memory ('host') or files ('disk')"
        batches, weave = "would have no effect: on a CPU the host prepares all batches", self.weave == "concurrent"
        refused = {
            "sharded": "is a kernel of GPUs; ranks on a CPU copy remote rows first: leave it out",
            "peers": "is memory of GPUs; ranks on a CPU share files in memory: leave it out",
            "weave": weave and "needs a GPU: a CPU runs one operator at a time; leave it out",
            "features": self.placement.features == "gpu" and lie,
            "topology": self.placement.topology in ("gpu", "cached") and lie,
            "sampler": "needs a GPU; a CPU has the default sampler alone",
            "division": self.hardware is None and batches,
            "overlap": batches,
        }
        for name, value in self.given.items() if kind != "cuda" else ():
            if refused.get(name):
                raise SpecError(f"{option(name, value)} {refused[name]}")

    def check_joins(self, tasks: Sequence[Task]) -> None:
        """A :class:`SpecError` if ``weave`` joins none of ``tasks``, all that there are; in a queue others may come."""
        if self.weave is not None and not self._weave_matters(tasks):
            raise SpecError(
                f"{option('weave', self.weave)} would have no effect: no two of these tasks differ in structure and "
                "train on the whole of one graph; leave it out"
            )

    def _weave_matters(self, tasks: Sequence[Task]) -> bool:
        """Whether some of ``tasks`` could share a GPU as different stacks; sampled ones share batches unless off."""
        structures: dict[Hashable, set[Hashable]] = {}
        for task in tasks:
            if self.weave == "off" or not task.sampled:
                alone = task.label if alone_reason(task) is not None else ""
                structure = (*stack_key(task).items(), width(task), alone)
                structures.setdefault(group_key(task, multilabel=False), set()).add(structure)
        return any(len(different) > 1 for different in structures.values())


def _sums_over_ranks(task: Task) -> bool:
    """Whether ``task`` may sum neighbours' rows in place over ranks."""
    maximum = task.traits is not None and "aggregator" in task.traits.shaping and task.aggregator == "max"
    return not task.sampled and not maximum and (task.traits is None or "spmm" in task.traits.operators)


def refuse_misplaced(keywords: Mapping[str, Any], caller: str) -> None:
    """A :class:`SpecError` for keywords that ``caller`` does not take by themselves; says where an option is given."""
    for name, value in keywords.items():
        for table, given_as in ((RunOptions, "options=RunOptions"), (Placement, "placement=Placement")):
            if any(row.name == name for row in fields(table)):
                shown = option(name, value)
                raise SpecError(f"{caller} takes no {shown} by itself; give {given_as}({shown})")
        raise SpecError(f"{caller} takes no {name}={nearest_names(name, RunOptions.__dataclass_fields__)}")


def options_of(reader: str) -> list[Any]:
    """The fields of all options that ``reader`` reads, those of a placement included, in the order of the table."""
    every = [row for table in (RunOptions, Placement) for row in fields(table) if "rule" in row.metadata]
    return [row for row in every if reader in row.metadata["readers"]]
