"""``weft data ls|info|make|convert``: list, inspect, generate and convert graphs."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from weft.core.errors import SpecError
from weft.core.graph_stats import GraphStats

if TYPE_CHECKING:
    from weft.graph.graph import Graph

PIPE_WIDTH = 1000  # rich would cut a table at 80 columns if there is no terminal

app = typer.Typer(
    help="List, inspect, generate and convert graphs.", no_args_is_help=True, pretty_exceptions_enable=False
)

Json = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of a table.")]
Seed = Annotated[int, typer.Option(help="Seed of generated graphs.")]
Device = Annotated[str, typer.Option(help="Where to generate: auto, cpu, cuda, cuda:N.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to save the graph in.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a graph that is saved there.")]


@app.command("ls")
def list_graphs(json: Json = False) -> None:
    """Everything that can be loaded by name (paths can be, too)."""
    from weft.cli.data_list import print_graphs

    print_graphs(json)


@app.command()
def info(
    graph: Annotated[str, typer.Argument(help="A name that `weft data ls` shows, or a path.")],
    json: Json = False,
    seed: Seed = 0,
    device: Device = "cpu",
) -> None:
    """Sizes, features, labels, splits and degrees of a graph."""
    from weft.engine.machine import choose_device
    from weft.graph.catalog import names as catalog

    stats = catalog.load(graph, seed=seed, device=choose_device(device)).stats()
    if json:
        print(jsonlib.dumps(stats.to_dict()))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in _facts(stats):
        table.add_row(f"[dim]{name}[/dim]", value)
    _console().print(table)


@app.command()
def make(
    kind: Annotated[str, typer.Argument(help="A shape (`weft data ls`), or citation, sbm, rmat.")],
    out: Out,
    seed: Seed = 0,
    scale: Annotated[float | None, typer.Option(help="Shapes: this many times the nodes.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes.")] = None,
    edges: Annotated[int | None, typer.Option(help="Stored entries; undirected edges count twice.")] = None,
    features: Annotated[int | None, typer.Option(help="Number of features.")] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes (sbm: of blocks).")] = None,
    max_degree: Annotated[int | None, typer.Option(help="citation: degree of the largest hub.")] = None,
    homophily: Annotated[float | None, typer.Option(help="citation: share of edges inside a class.")] = None,
    density: Annotated[float | None, typer.Option(help="citation: sparse features of this density.")] = None,
    relations: Annotated[int | None, typer.Option(help="citation: number of edge relations.")] = None,
    directed: Annotated[bool | None, typer.Option("--directed", help="citation, rmat: directed edges.")] = None,
    p_in: Annotated[float | None, typer.Option(help="sbm: edge probability inside a block.")] = None,
    p_out: Annotated[float | None, typer.Option(help="sbm: edge probability between blocks.")] = None,
    device: Device = "cpu",
    overwrite: Overwrite = False,
) -> None:
    """Generate a graph and save it as a folder that `weft run` and weft.load open."""
    from weft.engine.machine import choose_device

    given = {
        "scale": scale, "nodes": nodes, "edges": edges, "features": features, "classes": classes,
        "max_degree": max_degree, "homophily": homophily, "density": density, "relations": relations,
        "directed": directed, "p_in": p_in, "p_out": p_out,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    maker, known = _MAKERS.get(kind, (_make_shape, {"scale"}))
    unknown = sorted(set(given) - known)
    if unknown:
        takes = ", ".join(_flag(name) for name in sorted(known))
        raise SpecError(f"weft data make {kind} takes no {_flag(unknown[0])}; it takes {takes}")
    graph = maker(kind, given, {"seed": seed, "device": choose_device(device)})
    _save(graph, out, overwrite)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="IN", help="A file, a folder or a name.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to save the graph in.")],
    undirected: Annotated[
        bool, typer.Option("--undirected", help="Files: add the missing reverse edges, merge duplicates.")
    ] = False,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="TRAIN,VAL[,TEST]",
            help="Split the labelled nodes at random by --seed: shares or numbers; TEST is the rest unless given.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of generated graphs and of --split.")] = 0,
    overwrite: Overwrite = False,
) -> None:
    """Read any graph and save it as a folder that opens at once, whatever its size."""
    from weft.graph import readers
    from weft.graph.catalog import names as catalog

    if not undirected:
        graph = catalog.load(source, seed=seed)
    elif Path(source).exists():
        graph = readers.read(source, directed=False)
    else:
        raise SpecError(f"--undirected is for edge files; {source!r} is not the path of one")
    if split is not None:
        graph = graph.random_split(*_parts(split), seed=seed)
    _save(graph, target, overwrite)


def _parts(text: str) -> list[float]:
    """``"0.6,0.2"`` as shares, ``"140,500,1000"`` as numbers of nodes."""
    try:
        parts = [float(word) if "." in word else int(word) for word in text.split(",")]
    except ValueError:
        parts = []
    if len(parts) not in (2, 3):
        raise SpecError(f"--split {text}: expected shares such as 0.6,0.2 or numbers of nodes such as 140,500,1000")
    return parts


# ---- making -------------------------------------------------------------------------------------------

Options = dict[str, Any]


def _make_shape(kind: str, given: Options, place: Options) -> Graph:
    from weft.graph.catalog import shapes

    return shapes.make(kind.removeprefix("shape:"), **given, **place)


def _make_citation(kind: str, given: Options, place: Options) -> Graph:
    from weft.graph import generate

    nodes = given.pop("nodes", 10_000)
    sizes = (nodes, given.pop("edges", 10 * nodes), given.pop("features", 64), given.pop("classes", 8))
    return generate.citation(*sizes, **given, **place)


def _make_sbm(kind: str, given: Options, place: Options) -> Graph:
    from weft.graph import generate

    nodes, blocks = given.get("nodes", 10_000), given.get("classes", 8)
    if not 1 <= blocks <= nodes:
        raise SpecError(f"--classes {blocks} must lie in 1..{nodes}, the number of nodes")
    sizes = [nodes // blocks + (block < nodes % blocks) for block in range(blocks)]
    rates = (given.get("p_in", min(1.0, 8.0 * blocks / nodes)), given.get("p_out", min(1.0, 2.0 / nodes)))
    return generate.sbm(sizes, *rates, num_features=given.get("features", 16), **place)


def _make_rmat(kind: str, given: Options, place: Options) -> Graph:
    from weft.graph import generate

    nodes = given.get("nodes", 10_000)
    return generate.rmat(
        nodes,
        given.get("edges", 16 * nodes),
        num_features=given.get("features", 16),
        num_classes=given.get("classes", 8),
        directed=given.get("directed", False),
        **place,
    )


_SIZES = {"nodes", "features", "classes"}
_MAKERS: dict[str, tuple[Callable[[str, Options, Options], Graph], set[str]]] = {
    "citation": (
        _make_citation,
        _SIZES | {"edges", "max_degree", "homophily", "density", "relations", "directed"},
    ),
    "sbm": (_make_sbm, _SIZES | {"p_in", "p_out"}),
    "rmat": (_make_rmat, _SIZES | {"edges", "directed"}),
}


def _save(graph: Graph, out: Path, overwrite: bool) -> None:
    graph.save(out, overwrite=overwrite)
    print(f"{graph!r} -> {out}", file=sys.stderr)


# ---- showing ------------------------------------------------------------------------------------------


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _facts(stats: GraphStats) -> list[tuple[str, str]]:
    """The rows of `weft data info`, in order."""
    kinds = ["symmetric" if stats.symmetric else "directed"] + (["weighted"] if stats.weighted else [])
    features = f"{stats.num_features:,} ({stats.feature_dtype}"
    if stats.feature_nnz is not None:
        features += f", sparse, {stats.feature_nnz:,} stored"
    facts = [
        ("name", stats.name),
        ("nodes", _count(stats.num_nodes)),
        ("edges", f"{stats.num_edges:,} ({', '.join(kinds)})"),
        ("degree", f"{stats.num_edges / max(1, stats.num_nodes):.1f} on average, {stats.max_degree:,} at most"),
        ("features", features + ")" if stats.num_features else "none"),
        ("targets" if stats.regression else "labels" if stats.multilabel else "classes", _count(stats.num_classes)),
    ]
    if stats.num_relations:
        facts.append(("relations", _count(stats.num_relations)))
    split = (stats.num_train, stats.num_val, stats.num_test)
    facts.append(("train / val / test", " / ".join(_count(size) for size in split)))
    return facts + [("degrees", line) for line in _degree_lines(stats)]


def _degree_lines(stats: GraphStats) -> list[str]:
    """One line per power of two: how many nodes have such a degree."""
    lines = []
    for length, count in enumerate(stats.degree_histogram):
        if count:
            low, high = (1 << length) // 2, (1 << length) - 1
            span = f"{low:,}" if low >= high else f"{low:,}-{high:,}"
            lines.append(f"{span:>17}  {count:>13,} nodes")
    return lines
