"""``result.export``: a trained model as a file for other libraries, with the treatment of its features inside."""

from __future__ import annotations

import importlib.util
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import fx

from weft.core.errors import InputError, SpecError
from weft.core.event import finite
from weft.core.version import __version__
from weft.nn.models import is_named_model
from weft.runtime.checkpoint import save_atomically
from weft.runtime.infer import TrainedInputs
from weft.runtime.modules.build import copy_module
from weft.runtime.modules.settings import OF_EDGES, call_style, parameters_of

if TYPE_CHECKING:
    from weft.engine.result import Result


def portable(result: Result) -> fx.GraphModule:
    """The model of ``result`` over torch and PyG, called with ``x``, ``edge_index`` and what else it reads of edges.

    Its code needs nothing of Weft to load, and divides the features as in training.
    """
    model, trained = result.model, result.trained_on
    names = ["edge_index"]
    held = (trained.weighted, trained.num_relations, trained.edge_features is not None)
    of_edges = [name for name, there in zip(OF_EDGES, held, strict=True) if there]
    if is_named_model(model):
        from weft.nn.pyg.convert import to_pyg

        theirs, traits = to_pyg(model), result.task.traits  # type: ignore[arg-type]
        reads = {"edge_weight": traits.weighted, "edge_type": traits.relational}
        names += [name for name in of_edges if reads.get(name)]
    else:
        theirs, _ = copy_module(model)
        style = call_style(theirs)
        if style not in ("edges", "features"):
            taken = {"data": "a whole Data", "transposed": "an adj_t"}.get(style, "Weft's adjacency")
            raise SpecError(
                f"task {result.name!r}: {result.task.model_name} takes {taken}, not edge_index; export safetensors"
            )
        names = [*names, *(name for name in of_edges if name in parameters_of(theirs))] if style == "edges" else []
    norm = result.task.feature_norm
    for key, hook in list(theirs._forward_pre_hooks.items()):
        if isinstance(hook, TrainedInputs):  # Weft's, in whose place the features are divided outside
            theirs._forward_pre_hooks.pop(key)
            theirs._forward_pre_hooks_with_kwargs.pop(key, None)
    graph = fx.Graph()
    x, *edges = (graph.placeholder(name) for name in ("x", *names))
    if norm == "row":
        total = graph.call_method("sum", (graph.call_method("abs", (x,)), 1, True))
        positive = graph.call_method("gt", (total, 0))
        x = graph.call_method("div", (x, graph.call_function(torch.where, (positive, total, 1.0))))
    graph.output(graph.call_module("model", (x, *edges[:1]), dict(zip(names[1:], edges[1:], strict=True))))
    return fx.GraphModule({"model": theirs.cpu()}, graph).eval()


# ---- Formats


def _write_safetensors(result: Result, path: Path) -> None:
    from weft.engine.result import weights_of

    state = {key: value.detach().cpu().clone().contiguous() for key, value in weights_of(result.model).items()}
    about = {"task": result.task.to_dict(), "metrics": result.metrics, "weft": __version__}
    save_atomically(path, state, {"format": "pt", **{key: json.dumps(finite(value)) for key, value in about.items()}})


def _program(result: Result) -> torch.export.ExportedProgram:
    """The model as a program for any number of nodes N and edges E: ``x [N, F]``, ``edge_index [2, E]``."""
    module, nodes, edges = portable(result), torch.export.Dim("nodes"), torch.export.Dim("edges")
    trained = result.trained_on
    examples = {  # of the sizes of a small graph: a program is traced, and its values do not matter
        "x": (torch.ones(5, trained.num_features), {0: nodes}),
        "edge_index": (torch.tensor([[0, 1, 2, 3, 4, 1], [1, 2, 3, 4, 0, 0]]), {1: edges}),
        "edge_weight": (torch.ones(6), {0: edges}),
        "edge_type": (torch.arange(6) % max(trained.num_relations, 1), {0: edges}),
        "edge_attr": (torch.ones(6, *filter(None, [trained.edge_features])), {0: edges}),
    }
    inputs = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    values, axes = tuple(examples[name][0] for name in inputs), {name: examples[name][1] for name in inputs}
    backend = sys.modules.get("torch_geometric.backend")
    chosen = getattr(backend, "use_segment_matmul", None)
    try:
        if backend is not None:  # which way an RGCNConv takes; None reads the number of edges, as no program can
            vars(backend)["use_segment_matmul"] = False
        return torch.export.export(module, values, dynamic_shapes=axes, strict=False)
    finally:
        if backend is not None:
            vars(backend)["use_segment_matmul"] = chosen


def _write_onnx(result: Result, path: Path) -> None:
    for library in ("onnx", "onnxscript"):
        if importlib.util.find_spec(library) is None:
            raise SpecError(f"to='onnx' needs {library}: pip install 'weft-gnn[onnx]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's exporter about its own parts
        torch.onnx.export(_program(result), (), path, external_data=False, output_names=["logits"], verbose=False)


FORMATS: Mapping[str, tuple[str, Callable[[Result, Path], None]]] = {
    "pyg": (".pt", lambda result, path: torch.save(portable(result), path)),
    "torch-export": (".pt2", lambda result, path: torch.export.save(_program(result), path)),
    "onnx": (".onnx", _write_onnx),
    "safetensors": (".safetensors", _write_safetensors),
}


def export(result: Result, to: str, out: str | Path | None = None) -> Path:
    """Write the model of ``result`` as ``to``, one of :data:`FORMATS`, to the file ``out``; returns its path."""
    if to not in FORMATS:
        raise SpecError(f"to={to!r} must be one of {', '.join(FORMATS)}")
    if result.model is None or result.trained_on is None:
        raise SpecError(f"task {result.name!r}: has no model to export; it {result.status}: {result.message}")
    ending, write = FORMATS[to]
    path = Path(f"model{ending}" if out is None else out)
    if path.suffix != ending:
        raise SpecError(f"out={str(path)!r} must end in {ending}, as files of {to} do")
    partial = path.with_name(f".{path.stem}.partial{ending}")  # by its ending torch knows what to write
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        partial.touch()  # torch's writers say in their own words, of C++, that a file cannot be opened
        write(result, partial)
        partial.replace(path)
    except OSError as error:
        raise InputError(f"out={str(path)!r}: cannot be written ({error.strerror})") from None
    except InputError:
        raise
    except Exception as error:  # what an exporter of torch does not support it raises in many ways
        reason = str(error).strip().partition("\n")[0]
        words = f"{to} cannot express this model ({type(error).__name__}: {reason})"
        raise SpecError(f"task {result.name!r}: {words}; export pyg or safetensors") from error
    finally:
        with suppress(OSError):
            partial.unlink()
    return path
