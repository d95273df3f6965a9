"""From a request to an inference task: the weights of a task of the queue or of a file, a graph, nodes, a target.

``{"infer": {"of": TASK, "nodes": "test", "latency_target": 0.5}}`` uses the best weights of a task, once it is done.
``{"task": SETTINGS, "infer": {"weights": FILE}}`` uses a safetensors file in the operator's folder of graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from weft.serve.http.json_limits import BadRequestError
from weft.serve.queue.task_states import QueueTask

INFER_FIELDS = ("of", "weights", "nodes", "graph", "latency_target")
NODE_NAMES = ("all", "train", "val", "test")
MOST_NODES = 1_000_000
MOST_SECONDS = 86_400.0
Find = Callable[[str], QueueTask]


def inference_source(body: Mapping[str, Any], find: Find) -> tuple[dict[str, Any], str | None]:
    """The settings that the model was trained with, with the graph to infer on, and the task that it is of."""
    infer = _fields(body)
    of, given = infer.get("of"), body.get("task")
    if (of is None) == (given is None) or (of is None) != (infer.get("weights") is not None):
        raise BadRequestError("give infer.of, a task whose weights to use, or task with infer.weights, a file")
    if of is None:
        if not isinstance(given, dict):
            raise BadRequestError("a task must be an object of settings")
        return _on(dict(given), infer), None
    if not isinstance(of, str):
        raise BadRequestError("infer.of must be the id of a task")
    trained = find(of)
    if trained.spec.get("kind") == "inference":
        raise BadRequestError(f"infer.of={of[:80]!r} is an inference task, which has no weights of its own")
    return _on({k: v for k, v in trained.spec["task"].items() if k != "name"}, infer), of


def inference_spec(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker has to know beside the settings."""
    infer = _fields(body)
    spec: dict[str, Any] = {"nodes": _nodes(infer.get("nodes"))}
    target = infer.get("latency_target")
    if target is not None:
        if isinstance(target, bool) or not isinstance(target, (int, float)) or not 0 < target <= MOST_SECONDS:
            asked = "seconds from submission to answer, above 0 and at most"
            raise BadRequestError(f"infer.latency_target must be {asked} {MOST_SECONDS:,.0f}")
        spec["latency_target"] = float(target)
    return spec


def _fields(body: Mapping[str, Any]) -> Mapping[str, Any]:
    infer = body["infer"]
    if not isinstance(infer, dict):
        raise BadRequestError('infer must be an object such as {"of": TASK, "nodes": "test"}')
    unknown = sorted(set(infer) - set(INFER_FIELDS))
    if unknown:
        raise BadRequestError(f"unknown field infer.{unknown[0][:80]}; known are {', '.join(INFER_FIELDS)}")
    return infer


def _on(settings: dict[str, Any], infer: Mapping[str, Any]) -> dict[str, Any]:
    return settings if infer.get("graph") is None else {**settings, "graph": infer["graph"]}


def _nodes(nodes: Any) -> Any:
    if nodes is None or (isinstance(nodes, str) and nodes in NODE_NAMES):
        return nodes
    whole = isinstance(nodes, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in nodes)
    if not whole or not 1 <= len(nodes) <= MOST_NODES or not all(0 <= node < 2**62 for node in nodes):
        raise BadRequestError(f"infer.nodes must be {', '.join(NODE_NAMES)} or a list of up to {MOST_NODES:,} node ids")
    return nodes
