"""The nodes of a Ray cluster, and the connection to it. Ray is an extra, imported here and where it is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.core.errors import InputError, SpecError

HEAD = "node:__internal_head__"


@dataclass(frozen=True)
class Node:
    """A node: its id, memory in bytes, GPUs and what they are called (as Ray calls them, lower case), and CPUs."""

    id: str
    memory: int
    gpus: int = 0
    gpu: str = ""
    head: bool = False
    cpus: int = 1


def import_ray() -> Any:
    """Ray, or one sentence."""
    try:
        import ray
    except ImportError:
        raise InputError("on='ray' needs Ray: pip install 'weft-gnn[ray]'") from None
    return ray


def address_of(on: str) -> str | None:
    """``"ray"``: the cluster at hand, or one on this machine (None); ``"ray://host:port"``: that one."""
    if on == "ray":
        return None
    if on.startswith("ray://") and len(on) > len("ray://"):
        return on
    raise SpecError(f"on={on!r} must be 'ray' or 'ray://HOST:PORT'")


def connect(on: str) -> tuple[Any, bool]:
    """Ray, connected to the cluster that ``on`` names, and whether this call did it."""
    address, ray = address_of(on), import_ray()
    if ray.is_initialized():
        return ray, False
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ImportError, ValueError) as error:  # Ray's client is an extra of Ray's
        if address is None or "ray[client]" not in str(error):
            raise
        raise InputError(f"on={on!r} needs Ray's client: pip install 'weft-gnn[ray]' (or 'ray[client]')") from None
    except ConnectionError as error:
        raise InputError(f"on={on!r}: no Ray cluster answers there ({str(error).splitlines()[0]})") from None
    return ray, True


def nodes_of(ray: Any) -> list[Node]:
    """The nodes that are there."""
    found = []
    for one in ray.nodes():
        if one["Alive"]:
            has = one["Resources"]
            kind = next((name.split(":", 1)[1] for name in has if name.startswith("accelerator_type:")), "")
            gpus, cpus, memory = (int(has.get(name, 0)) for name in ("GPU", "CPU", "memory"))
            found.append(Node(one["NodeID"], memory, gpus, kind.lower(), HEAD in has, cpus))
    return found


def device_names(nodes: list[Node]) -> tuple[str, ...]:
    """The devices of ``nodes`` as ``DEVICE@NODE``: their GPUs, or the CPU of each if there is none at all."""
    gpus = [f"cuda:{place}@{node.id}" for node in nodes for place in range(node.gpus)]
    return tuple(gpus or [f"cpu@{node.id}" for node in nodes])
