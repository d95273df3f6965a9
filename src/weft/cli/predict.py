"""``weft predict``: what a trained model says of the nodes of a graph, as a file."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from weft.cli.format import check_file, numbers, writing
from weft.cli.options import Device
from weft.core.errors import SpecError
from weft.core.startup import gc_paused

if TYPE_CHECKING:
    from numpy import ndarray

    from weft.engine.result import Result

ENDINGS = (".npy", ".csv")
ROWS = 1 << 16  # of a CSV file, written at once
WHAT = ("classes", "proba", "logits", "embedding")
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run or a sweep that has ended.")]
Member = Annotated[str | None, typer.Option(help="Of a sweep, which member by its name.", show_default="the best")]


def predict(
    run: Run,
    graph: Annotated[
        str | None, typer.Argument(metavar="[GRAPH]", help="Name or path of a graph.", show_default="as trained on")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE.npy|FILE.csv", help="Where to write.")] = Path("predictions.csv"),
    what: Annotated[
        str, typer.Option(metavar="classes|proba|logits|embedding", help="What to write per node.")
    ] = "classes",
    member: Member = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="train|val|test|IDS", help="A split, or ids: 3,5,8, or a table's.", show_default="all nodes"
        ),
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option(help="Of an embedding: which layer, by number or name.", show_default="the last hidden one"),
    ] = None,
    fanout: Annotated[
        str | None,
        typer.Option(metavar="K,K", help="From so many sampled neighbours per hop.", show_default="all neighbours"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the samples.", show_default="0")] = None,
    device: Device = "auto",
    layerwise: Annotated[
        bool | None,
        typer.Option(
            "--layerwise/--whole",
            help="Layer by layer in bounded memory, or all at once.",
            show_default="by the size of the graph",
        ),
    ] = None,
) -> None:
    """Predict with the model in RUN on GRAPH: a row per node, with features treated as in training.

    A CSV file has the columns `node` and `class` (or one per class), an NPY file the array alone.
    """
    check_file(out)
    if out.suffix not in ENDINGS:
        raise SpecError(f"--out {out}: must end in {' or '.join(ENDINGS)}")
    if what not in WHAT:
        raise SpecError(f"--what {what}: must be one of {', '.join(WHAT)}")
    if layer is not None and what != "embedding":
        raise SpecError(f"--layer {layer} is for --what embedding")
    with gc_paused():
        import numpy as np

        from weft.engine.result import graph_for, nodes_of
        from weft.graph.labels import SPLITS
    result = trained(run, member)
    target = graph_for(result, graph)
    own = target.ids is not None and nodes is not None and nodes not in SPLITS  # the ids that the output has
    ids = nodes_of(next(csv.reader([nodes])) if own else numbers(nodes, "nodes"), target)
    methods = {"classes": result.predict, "proba": result.predict_proba, "logits": result.predict_logits}
    options = {"device": device, "layerwise": layerwise, "fanout": numbers(fanout, "fanout"), "seed": seed}
    if what == "embedding":
        options["layer"] = int(layer) if layer is not None and layer.isdecimal() else layer
    values = methods.get(what, result.embed)(target, ids, **options).numpy()
    with writing(out) as partial, partial.open("wb") as file:
        if out.suffix == ".npy":
            np.save(file, values)
        else:
            write_csv(file, ids.numpy() if target.ids is None else target.ids[ids.numpy()], values, what)
    typer.echo(f"{out}: {len(values):,} nodes, {what} of {result.name!r}")


def export(
    run: Run,
    to: Annotated[str, typer.Option(metavar="pyg|torch-export|onnx|safetensors", help="The format.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write.", show_default="model.pt, .pt2, .onnx, ...")
    ] = None,
    member: Member = None,
) -> None:
    """Write the model in RUN for other libraries: called with x and edge_index, it treats features as in training."""
    result = trained(run, member)
    typer.echo(f"{result.export(to, out)}: {to} of {result.name!r}")


def trained(run: Path, member: str | None) -> Result:
    """The result in the folder ``run``; of a sweep that of ``member``, or the best."""
    with gc_paused():
        from weft.engine.loading import read_result
        from weft.engine.result import Result
    loaded = read_result(run)
    if isinstance(loaded, Result):
        if member is not None:
            raise SpecError(f"--member {member}: {run} holds one run, not a sweep")
        return loaded
    try:
        return loaded.best() if member is None else loaded[member]
    except KeyError as error:
        raise SpecError(f"--member {member}: {error.args[0]}") from None


def write_csv(file: IO[bytes], ids: ndarray, values: ndarray, what: str) -> None:
    """A row per node: its id, and its value or values."""
    import numpy as np

    each = "value" if what == "classes" and values.dtype.kind == "f" else "h" if what == "embedding" else "class"
    several = [f"{each}_{c}" for c in range(values.shape[1])] if values.ndim == 2 else []
    columns = ["class"] if values.ndim == 1 else ["value"] if len(several) == 1 else several
    file.write((",".join(["node", *columns]) + "\n").encode())
    whole = values.dtype.kind == "i"
    for first in range(0, len(ids), ROWS):
        lines, written = np.column_stack([values[first : first + ROWS]]).tolist(), io.StringIO()
        texts = ([str(number) if whole else f"{number:.9g}" for number in line] for line in lines)
        named = zip(ids[first : first + ROWS].tolist(), texts, strict=True)
        csv.writer(written, lineterminator="\n").writerows([name, *text] for name, text in named)
        file.write(written.getvalue().encode())
