"""``result.export``: a trained model as a file for other libraries, with the treatment of its features inside."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

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
    """The model of ``result`` over torch and PyG, called with ``x``, ``edge_index`` and what else it reads of edges."""
    start, model, trained = f"task {result.name!r}: {result.task.model_name} ", result.model, result.trained_on
    assert model is not None and trained is not None  # noqa: PT018
    norm = None
    if is_named_model(model):
        from weft.nn.pyg.convert import to_pyg

        theirs = to_pyg(model)  # type: ignore[arg-type]
        names = ["edge_weight"] if trained.weighted and type(model).__name__ == "GCN" else []
    elif call_style(model) != "edges":
        raise SpecError(f"{start}takes another argument than edge_index, as no other library gives; export safetensors")
    else:
        theirs, _ = copy_module(model)
        there = zip(OF_EDGES, (trained.weighted, trained.num_relations, trained.edge_features is not None), strict=True)
        names = [name for name, held in there if held and name in parameters_of(theirs)]
        if names not in ([], ["edge_weight"]):
            raise SpecError(f"{start}reads {', '.join(names)} of every edge, which is not exported; export safetensors")
    for key, hook in list(theirs._forward_pre_hooks.items()):
        if isinstance(hook, TrainedInputs):  # Weft's, in whose place the features are divided outside
            norm = hook.norm or norm
            theirs._forward_pre_hooks.pop(key)
            theirs._forward_pre_hooks_with_kwargs.pop(key, None)
    return with_feature_norm(theirs.cpu(), norm, names).eval()


def with_feature_norm(model: nn.Module, norm: str | None, edge_names: list[str]) -> fx.GraphModule:
    """``model`` after the features are divided as in training; a module whose code needs nothing of Weft to load."""
    graph = fx.Graph()
    x, index = graph.placeholder("x"), graph.placeholder("edge_index")
    more: dict[str, Any] = {name: graph.placeholder(name) for name in edge_names}
    if norm == "row":
        total = graph.call_method("sum", (graph.call_method("abs", (x,)), 1, True))
        positive = graph.call_method("gt", (total, 0))
        x = graph.call_method("div", (x, graph.call_function(torch.where, (positive, total, 1.0))))
    graph.output(graph.call_module("model", (x, index), more))
    return fx.GraphModule({"model": model}, graph)


# ---- Formats


def _write_safetensors(result: Result, path: Path) -> None:
    from weft.engine.result import weights_of

    assert result.model is not None
    state = {key: value.detach().cpu().clone().contiguous() for key, value in weights_of(result.model).items()}
    about = {"task": result.task.to_dict(), "metrics": result.metrics, "weft": __version__}
    save_atomically(path, state, {"format": "pt", **{key: json.dumps(finite(value)) for key, value in about.items()}})


def _program(result: Result) -> torch.export.ExportedProgram:
    """The model as a program for any number of nodes N and edges E: ``x [N, F]``, ``edge_index [2, E]``."""
    module, nodes, edges = portable(result), torch.export.Dim("nodes"), torch.export.Dim("edges")
    assert result.trained_on is not None
    examples = {  # of the sizes of a small graph: a program is traced, and its values do not matter
        "x": (torch.ones(5, result.trained_on.num_features), {0: nodes}),
        "edge_index": (torch.tensor([[0, 1, 2, 3, 4, 1], [1, 2, 3, 4, 0, 0]]), {1: edges}),
        "edge_weight": (torch.ones(6), {0: edges}),
    }
    inputs = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    values, axes = tuple(examples[name][0] for name in inputs), {name: examples[name][1] for name in inputs}
    return torch.export.export(module, values, dynamic_shapes=axes, strict=False)


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
        partial.unlink(missing_ok=True)
    return path
