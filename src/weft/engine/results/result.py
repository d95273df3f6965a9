"""Result: the outcome of one training, in memory and on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from weft.core.errors import InputError
from weft.core.files import write_json
from weft.core.graph_stats import GraphStats
from weft.core.plan import Plan
from weft.core.task import Task
from weft.engine.results.html import result_html
from weft.engine.results.predicting import classes_of, predicted_logits, probabilities_of
from weft.runtime.checkpoint import save_atomically

IO_ERROR = "Error while serializing: I/O error: "  # before what the system says, as safetensors words it
RESULT_FILES = RESULT, WEIGHTS, KEPT = "result.json", "model.safetensors", "kept.safetensors"
STATUSES = (  # stopped: early, out of patience
    *("finished", "stopped", "diverged", "pruned", "cancelled", "preempted", "failed"),
)


@dataclass(repr=False)
class Result:
    """A trained task.

    ``metrics``: loss and metric of every split at the best epoch (``train_accuracy``, ``val_accuracy``,
    ``test_accuracy``, ``val_loss``, ...), ``metric`` (its name), ``best_epoch``, ``epochs_run``, ``seconds``
    and ``seconds_per_epoch``. ``history``: a list per column, one entry an epoch, NaN where not measured.
    ``model``: the module with its best weights, in evaluation mode, None if training could not begin.
    It takes a graph's own features, ``model(graph.x, graph.adj)``, and treats them as the training did.
    ``status``: one of :data:`STATUSES`. ``message``: what went wrong, where something did. ``trained_on``: a summary of
    the graph. ``dense_features``: whether sparse features were made dense for the model. ``model_code``: a
    digest of the file that the model was imported from. ``kept``: what the module keeps in Python beside its weights.
    """

    task: Task
    plan: Plan
    metrics: dict[str, Any]
    history: dict[str, list[float]]
    model: nn.Module | None
    environment: dict[str, Any]
    status: str = "finished"
    message: str = ""
    trained_on: GraphStats | None = None
    dense_features: bool = False
    model_code: str | None = None
    kept: dict[str, Tensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        name = self.metrics.get("metric")
        scores = {split: self.metrics.get(f"{split}_{name}") for split in ("val", "test")}
        words = [f"{split} {name} {value:.4g}" for split, value in scores.items() if isinstance(value, float)]
        words.append(f"best epoch {self.metrics.get('best_epoch', 0)} of {self.metrics.get('epochs_run', 0)}")
        return f"<Result {self.name!r}: {self.status}, {', '.join(words)}>"

    def _repr_html_(self) -> str:
        return result_html(self)

    @property
    def name(self) -> str:
        """What the task is called."""
        return self.task.label

    def predict(
        self,
        graph: Any = None,
        nodes: Any = None,
        *,
        device: str | torch.device | None = None,
        layerwise: bool | None = None,
    ) -> Tensor:
        """Class numbers ``[M]`` of ``nodes``, or 0/1 ``[M, C]`` where a node may have several labels, on the CPU.

        ``graph``: the one it was trained on unless given; a :class:`weft.Graph`, a name or a path. ``nodes``: ids in
        any order, a mask, or the name of a split; all nodes unless given. ``device``: where to compute; where the model
        is, unless given. ``layerwise``: layer by layer in chunks of nodes, in bounded memory, for Weft's own models;
        None: if the graph is large. Features are treated as in training.
        """
        return classes_of(self, self.predict_logits(graph, nodes, device=device, layerwise=layerwise))

    def predict_proba(
        self,
        graph: Any = None,
        nodes: Any = None,
        *,
        device: str | torch.device | None = None,
        layerwise: bool | None = None,
    ) -> Tensor:
        """Probabilities ``[M, C]``; arguments as :meth:`predict`."""
        return probabilities_of(self, self.predict_logits(graph, nodes, device=device, layerwise=layerwise))

    def predict_logits(
        self,
        graph: Any = None,
        nodes: Any = None,
        *,
        device: str | torch.device | None = None,
        layerwise: bool | None = None,
    ) -> Tensor:
        """What the model returns, ``[M, C]`` float32; arguments as :meth:`predict`."""
        return predicted_logits(self, graph, nodes, device, layerwise)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: everything but the weights."""
        return {
            "status": self.status,
            **({"message": self.message} if self.message else {}),
            "task": self.task.to_dict(),
            "metrics": self.metrics,
            "environment": self.environment,
            "plan": self.plan.to_dict(),
            "history": self.history,
            **({} if self.trained_on is None else {"graph": self.trained_on.to_dict()}),
            **({"dense_features": True} if self.dense_features else {}),
            **({} if self.model_code is None else {"model_code": self.model_code}),
            **({"kept": KEPT} if self.kept else {}),
        }

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the files of the result into ``folder`` (:data:`RESULT_FILES`), each in one piece."""
        with write_errors(folder):
            return self.write(Path(folder))

    def write(self, folder: Path) -> Path:
        """As :meth:`save`, with the system's own errors."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.model is not None:
            save_atomically(folder / WEIGHTS, _own_tensors(self.model), {"format": "pt"})
            (folder / KEPT).unlink(missing_ok=True)
            if self.kept:
                save_atomically(folder / KEPT, self.kept, {"format": "pt"})
        write_json(folder / RESULT, self.to_dict())
        return folder


@contextmanager
def write_errors(folder: str | os.PathLike[str]) -> Iterator[None]:
    """A folder that cannot be written to is one sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot write to {os.fspath(folder)}: {write_reason(error)}") from error


def write_reason(error: Exception) -> str:
    """Why something could not be written, without what libraries put around it."""
    return getattr(error, "strerror", None) or str(error).removeprefix(IO_ERROR).partition(" (os error")[0]


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict on the CPU, with tied parameters written out (safetensors refuses shared memory)."""
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict().items()}
