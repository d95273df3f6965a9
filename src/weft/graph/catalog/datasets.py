"""Download public datasets on first use: Planetoid and PyG's through PyG, OGB's directly.

Without a network every loader fails within seconds, with one error that says what to use instead.
"""

from __future__ import annotations

import os
import shutil
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.core.errors import GraphError
from weft.core.wording import nearest_names
from weft.graph import readers
from weft.graph.catalog.listing import OGB_ARCHIVES, PLANETOID, check_published
from weft.graph.graph import Graph
from weft.graph.sparse_features import SparseFeatures

OGB_HOST = "https://snap.stanford.edu/ogb/data/nodeproppred"
PLANETOID_HOST, PYG_HOST = "https://github.com", "https://data.pyg.org"
ANSWER_SECONDS = 5.0  # a host that has not answered by then counts as out of reach
STALL_SECONDS = 30.0  # a download that delivers nothing for so long is given up
SPARSE_BELOW = 0.15  # features filled less than this are kept sparse


def planetoid(name: str, folder: Path) -> Graph:
    """Cora, CiteSeer or PubMed with the public split; their features are kept sparse."""
    name = check_published("planetoid", name)
    datasets = _pyg_datasets(f"planetoid:{name}")
    path, make = folder / "planetoid", partial(datasets.Planetoid, str(folder / "planetoid"), PLANETOID[name])
    return _fetch(f"planetoid:{name}", PLANETOID_HOST, path / PLANETOID[name].lower(), make, name)


def pyg(name: str, folder: Path) -> Graph:
    """One graph of ``torch_geometric.datasets``: ``Reddit``, or ``Amazon/Photo`` for a class that takes a name.

    Where the dataset has no split of its own, nodes are split 60/20/20.
    """
    kind, _, part = name.partition("/")
    datasets = _pyg_datasets(f"pyg:{name}")
    make = getattr(datasets, kind, None)
    if make is None:
        classes = [entry for entry in dir(datasets) if entry[:1].isupper()]
        raise GraphError(f"pyg:{name}: torch_geometric.datasets has no {kind!r}{nearest_names(kind, classes)}")
    path = folder / "pyg" / name.lower().replace("/", "-")
    options = {"name": part} if part else {}
    return _fetch(f"pyg:{name}", PYG_HOST, path, partial(make, str(path), **options), name.lower())


def ogb(name: str, folder: Path) -> Graph:
    """A node-property graph of the Open Graph Benchmark with its own split.

    ogbn-products and ogbn-proteins come with both directions of every edge, the others as published.
    """
    chosen = check_published("ogb", name)
    path = folder / "ogb" / chosen
    if not (path / "raw").is_dir():
        what = f"ogb:{chosen}"
        url = f"{OGB_HOST}/{OGB_ARCHIVES[chosen]}.zip"
        draft = path.with_name(f".{path.name}.draft-{os.getpid()}")
        try:
            if not reachable(url):
                raise GraphError(f"{what} is not on this machine yet and {url} does not answer; {_instead(what)}")
            draft.mkdir(parents=True)
            with (
                urllib.request.urlopen(url, timeout=STALL_SECONDS) as answer,
                (draft / "archive.zip").open("wb") as file,
            ):
                shutil.copyfileobj(answer, file, 2**20)
            with zipfile.ZipFile(draft / "archive.zip") as archive:
                archive.extractall(draft / "unpacked")
            (dataset,) = (raw.parent for raw in (draft / "unpacked").glob("*/raw"))
            shutil.rmtree(path, ignore_errors=True)
            os.replace(dataset, path)
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise GraphError(f"{what} could not be fetched: {_reason(error)}; {_instead(what)}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return readers.read(path, name=chosen)


def reachable(address: str, seconds: float = ANSWER_SECONDS) -> bool:
    """Whether a web host answers at all; gives up after ``seconds``, name look-up included."""
    answers: list[bool] = []

    def request_head() -> None:
        request = urllib.request.Request(address, method="HEAD")
        try:
            urllib.request.urlopen(request, timeout=seconds).close()
            answers.append(True)
        except urllib.error.HTTPError:
            answers.append(True)  # it answered, if only to refuse
        except (OSError, ValueError):
            answers.append(False)

    # In a thread of its own, because looking up a name has no time limit.
    thread = threading.Thread(target=request_head, daemon=True)
    thread.start()
    thread.join(seconds)
    return bool(answers and answers[0])


def _pyg_datasets(what: str) -> Any:
    try:
        from torch_geometric import datasets
    except ImportError:
        raise GraphError(f"{what} needs PyG: pip install torch-geometric; {_instead(what)}") from None
    return datasets


def _fetch(what: str, host: str, path: Path, load: Callable[[], Any], name: str) -> Graph:
    """The first graph of the dataset that ``load`` returns, sparse features kept sparse, split if it is not.

    Without files from an earlier time the host must answer first.
    """
    if not any(path.rglob("processed/*.pt")) and not reachable(host):
        raise GraphError(f"{what} is not on this machine yet and {host} does not answer; {_instead(what)}")
    try:
        dataset = load()
    except Exception as error:  # whatever a download, an archive or a foreign loader can raise
        raise GraphError(f"{what} could not be loaded: {_reason(error)}; {_instead(what)}") from error
    try:
        graph = Graph.from_pyg(dataset[0], name=name)
    except (TypeError, IndexError, KeyError, AttributeError) as error:
        raise GraphError(f"{name} does not hold one graph of nodes to classify: {_reason(error)}") from error
    dense = isinstance(graph.x, torch.Tensor)
    if dense and float(torch.count_nonzero(graph.x)) / max(1, graph.x.numel()) < SPARSE_BELOW:
        graph = graph._changed(x=SparseFeatures.from_torch(graph.x))
    if graph.y is not None and graph.train.numel() == 0:
        graph = graph.random_split(0.6, 0.2, seed=0)
    return graph


def _reason(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _instead(what: str) -> str:
    """What to do without a network; a shape where one has the dataset's name."""
    from weft.graph.catalog.shapes import SHAPES

    name = what.partition(":")[2].lower()
    shape = next((shape for shape in SHAPES if shape.lower() == name), None)
    generated = f'use the generated "shape:{shape}"' if shape else 'use the embedded "demo"'
    file = f"{name.replace('/', '-')}.npz"
    return f"connect to the internet, put {file} into $WEFT_DATA or ~/.cache/weft/data, or {generated}"
