"""``weft data ls|info|make|convert``: list, inspect, generate and convert graphs."""

from __future__ import annotations

import json as jsonlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.format import aligned
from weft.cli.options import Device, Json, ShellOption, takes
from weft.core.errors import SpecError

if TYPE_CHECKING:
    from weft.graph.graph import Graph

app = typer.Typer(
    help="List, inspect, generate and convert graphs.", no_args_is_help=True, pretty_exceptions_enable=False
)

Seed = Annotated[int, typer.Option(help="Seed of generated graphs.")]
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
    kinds = ["symmetric" if stats.symmetric else "directed"] + (["weighted"] if stats.weighted else [])
    features = f"{stats.num_features:,} ({stats.feature_dtype}"
    if stats.feature_nnz is not None:
        features += f", sparse, {stats.feature_nnz:,} stored"
    facts = [
        ("name", stats.name),
        ("nodes", f"{stats.num_nodes:,}"),
        ("edges", f"{stats.num_edges:,} ({', '.join(kinds)})"),
        ("degree", f"{stats.num_edges / max(1, stats.num_nodes):.1f} on average, {stats.max_degree:,} at most"),
        ("features", features + ")" if stats.num_features else "none"),
        ("targets" if stats.regression else "labels" if stats.multilabel else "classes", f"{stats.num_classes:,}"),
    ]
    if stats.num_relations:
        facts.append(("relations", f"{stats.num_relations:,}"))
    split = (stats.num_train, stats.num_val, stats.num_test)
    facts.append(("train / val / test", " / ".join(f"{size:,}" for size in split)))
    for length, count in enumerate(stats.degree_histogram):  # a line per power of two
        if count:
            low, high = (1 << length) // 2, (1 << length) - 1
            span = f"{low:,}" if low >= high else f"{low:,}-{high:,}"
            facts.append(("degrees", f"{span:>17}  {count:>13,} nodes"))
    print("\n".join(aligned(facts)))


MADE = (
    ShellOption("scale", float, "Shapes: this many times the nodes."),
    ShellOption("nodes", int, "citation: number of nodes."),
    ShellOption("edges", int, "citation: stored entries; undirected edges count twice."),
    ShellOption("features", int, "citation: number of features."),
    ShellOption("classes", int, "citation: number of classes."),
    ShellOption("max_degree", int, "citation: degree of the largest hub."),
    ShellOption("homophily", float, "citation: share of edges inside a class."),
    ShellOption("density", float, "citation: sparse features of this density."),
    ShellOption("relations", int, "citation: number of edge relations."),
    ShellOption("directed", bool, "citation: directed edges.", flag="--directed"),
)


@app.command()
@takes(*MADE)
def make(
    kind: Annotated[str, typer.Argument(help="A shape (`weft data ls`), or citation.")],
    out: Out,
    seed: Seed = 0,
    device: Device = "cpu",
    overwrite: Overwrite = False,
    **options: Any,
) -> None:
    """Generate a graph and save it as a folder that `weft run` and weft.load open."""
    from weft.engine.machine import choose_device
    from weft.graph import generate
    from weft.graph.catalog import shapes

    given = {name: value for name, value in options.items() if value is not None}
    known = {option.name for option in MADE if (option.name == "scale") != (kind == "citation")}
    unknown = sorted(set(given) - known)
    if unknown:
        flags = ["--" + name.replace("_", "-") for name in (unknown[0], *sorted(known))]
        raise SpecError(f"weft data make {kind} takes no {flags[0]}; it takes {', '.join(flags[1:])}")
    how = {"seed": seed, "device": choose_device(device)}
    if kind == "citation":
        nodes = given.pop("nodes", 10_000)
        edges, features, classes = given.pop("edges", 10 * nodes), given.pop("features", 64), given.pop("classes", 8)
        graph = generate.citation(nodes, edges, features, classes, **given, **how)
    else:
        graph = shapes.make(kind.removeprefix("shape:"), **given, **how)
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
            metavar="[KIND:]TRAIN,VAL[,TEST]",
            help="Split the labelled nodes at random by --seed: shares or numbers; TEST is the rest unless given. "
            "KIND: stratified, or per-class (TRAIN nodes of every class); folds:K, stratified-folds:K make K splits.",
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
        graph = _split(graph, split, seed)
    _save(graph, target, overwrite)


def _split(graph: Graph, split: str, seed: int) -> Graph:
    """The graph with the split or splits that the words of ``--split`` describe."""
    kind, _, sizes = split.rpartition(":")
    try:  # "0.6,0.2" are shares, "140,500,1000" numbers of nodes
        parts = [float(word) if "." in word else int(word) for word in sizes.split(",")]
    except ValueError:
        parts = []
    if kind in ("folds", "stratified-folds") and len(parts) == 1:
        return graph.k_fold(parts[0], seed, stratified=kind != "folds")  # type: ignore[arg-type]
    if kind in ("", "stratified", "per-class") and len(parts) in (2, 3):
        return graph.random_split(*parts, seed=seed, kind=kind.replace("-", "_") or "random")
    expected = "expected shares such as 0.6,0.2 or numbers of nodes such as 140,500,1000, maybe after stratified: or "
    raise SpecError(f"--split {split}: {expected}per-class:, or folds:10 or stratified-folds:10")


def _save(graph: Graph, out: Path, overwrite: bool) -> None:
    graph.save(out, overwrite=overwrite)
    print(f"{graph!r} -> {out}", file=sys.stderr)
