"""A Ray cluster: connect to it, see what its nodes have, and run shares on them.

Ray is an extra. A share asks for what its plan says it takes: a part of a GPU by its bytes, or of a node's memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from weft.cluster.node_work import train_share
from weft.cluster.ray_nodes import HEAD, Node, connect, nodes_of
from weft.cluster.shares import Share
from weft.core.errors import SpecError, TrainingError
from weft.core.units import show_bytes
from weft.planner.machine_profiles import PROFILES

POLL_SECONDS = 0.2
MOST_ATTEMPTS = 5  # of one share: a share that kills every node it is on is not tried for ever

Take = Callable[[str, str, Any], None]  # key of a share, kind of message, message


@contextmanager
def connected(on: str) -> Iterator[Cluster]:
    """The cluster that ``on`` names. What was connected before stays so."""
    ray, mine = connect(on)
    try:
        yield Cluster(ray)
    finally:
        if mine:
            ray.shutdown()


@dataclass
class _Running:
    share: Share
    attempt: int


@dataclass
class Cluster:
    """The nodes that Ray has, and shares on them. ``notes``: what went wrong on the way."""

    ray: Any
    notes: list[str] = field(default_factory=list)

    def nodes(self) -> list[Node]:
        """Those that are there."""
        return nodes_of(self.ray)

    def train(
        self, shares: list[Share], options: Mapping[str, Any], take: Take, done: Callable[[Share, Any], None]
    ) -> None:
        """Train every share somewhere; ``take`` gets messages, ``done`` the results of a share or its error.

        A share whose node is lost continues on another one, from the last checkpoint that came home.
        """
        mailbox = self._mailbox()
        kept: dict[str, bytes] = {}
        reserve = partial(needs, device=str(options["device"]), shares=len(shares), cpus=least_cpus(self.nodes()))
        submit = partial(self._submit, reserve, mailbox, options)
        running = {submit(share, 1, None): _Running(share, 1) for share in shares}

        def deliver() -> None:
            for key, attempt, kind, message in self.ray.get(mailbox.take.remote()):
                if kind == "checkpoint":
                    kept[key] = message
                elif any(one.share.key == key and one.attempt == attempt for one in running.values()):
                    take(key, kind, message)

        try:
            while running:
                ready, _ = self.ray.wait(list(running), num_returns=1, timeout=POLL_SECONDS)
                deliver()
                for reference in ready:
                    one = running.pop(reference)
                    outcome = self._outcome(reference, one)
                    if outcome is not None:
                        done(one.share, outcome)
                        continue
                    again = submit(one.share, one.attempt + 1, kept.get(one.share.key))
                    running[again] = _Running(one.share, one.attempt + 1)
                    how = "its last checkpoint" if one.share.key in kept else "the beginning"
                    take(one.share.key, "lost", f"the node of share {one.share.key} was lost; it continues from {how}")
        finally:
            for reference in running:
                self.ray.cancel(reference, force=True)
            self.ray.kill(mailbox)

    def _outcome(self, reference: Any, one: _Running) -> Any:
        """What a share came to; None if its node was lost and it is to be tried again."""
        errors = self.ray.exceptions
        try:
            return self.ray.get(reference)
        except errors.RayTaskError as error:
            raise TrainingError(f"share {one.share.key} failed on its node: {_last_line(error)}") from None
        except errors.RayError as error:
            if one.attempt >= MOST_ATTEMPTS:
                raise TrainingError(
                    f"share {one.share.key} lost its node {one.attempt} times; the last time: {_first_line(error)}"
                ) from None
            return None

    def _mailbox(self) -> Any:
        """Where nodes send messages: beside the head, which the cluster does not outlive."""
        on_head = {HEAD: 0.001} if any(node.head for node in self.nodes()) else {}
        return self.ray.remote(num_cpus=0, resources=on_head)(Mailbox).remote()

    def _submit(
        self,
        reserve: Callable[[Share, list[Node]], dict[str, Any]],
        mailbox: Any,
        options: Mapping[str, Any],
        share: Share,
        attempt: int,
        checkpoint: bytes | None,
    ) -> Any:
        wanted = reserve(share, self.nodes())
        # Ray fills half of a node before it takes the next one, unless it is asked to spread.
        task = self.ray.remote(max_retries=0, scheduling_strategy="SPREAD", **wanted)(_on_node)
        return task.remote(share, attempt, mailbox, checkpoint, dict(options))


def least_cpus(nodes: list[Node]) -> int:
    """CPUs of the smallest node that has any."""
    return min((node.cpus for node in nodes if node.cpus), default=1)


def needs(share: Share, nodes: list[Node], device: str, shares: int = 1, cpus: int = 1) -> dict[str, Any]:
    """What Ray is to reserve for ``share``, one of ``shares``: a part of a GPU, or memory and ``cpus`` of a node.

    A share takes a whole GPU while there is one for each, since Ray puts small parts on the same one. Without GPUs its
    ``cpus`` matter: Ray gives a task as many threads as it reserved. Refused if no node has as much memory.
    """
    if device.startswith("cuda"):
        largest = max((gpu_bytes(node.gpu) for node in nodes if node.gpus), default=0)
        if share.num_bytes > largest:
            raise SpecError(f"share {share.key} takes {show_bytes(share.num_bytes)}; no GPU of the cluster has as much")
        beside = math.ceil(shares / sum(node.gpus for node in nodes))  # shares of one GPU
        part = max(math.ceil(100 * share.num_bytes / largest), 100 // beside) / 100
        return {"num_cpus": 1, "num_gpus": min(1.0, part)}
    most = max((node.memory for node in nodes if node.cpus), default=0)
    if share.num_bytes > most:
        raise SpecError(
            f"share {share.key} takes {show_bytes(share.num_bytes)}; "
            f"the largest node of the cluster has {show_bytes(most)}"
        )
    return {"num_cpus": cpus, "memory": share.num_bytes}


def gpu_bytes(name: str) -> int:
    """The memory of a GPU by the name that Ray has for it; that of the smallest one known, if the name is not."""
    sizes = {key: profile.memory_bytes for key, profile in PROFILES.items() if profile.device == "cuda"}
    fitting = [size for key, size in sizes.items() if name and name in key]
    return min(fitting or list(sizes.values()))


class Mailbox:
    """Messages of nodes, in the order in which they arrive. A checkpoint replaces the one before it."""

    def __init__(self) -> None:
        self._messages: list[tuple[str, int, str, Any]] = []

    def put(self, key: str, attempt: int, kind: str, message: Any) -> None:
        """Add a message."""
        if kind == "checkpoint":
            self._messages = [one for one in self._messages if one[0] != key or one[2] != kind]
        self._messages.append((key, attempt, kind, message))

    def take(self) -> list[tuple[str, int, str, Any]]:
        """All messages; they are gone then."""
        found, self._messages = self._messages, []
        return found


def _on_node(share: Share, attempt: int, mailbox: Any, checkpoint: bytes | None, options: dict[str, Any]) -> Any:
    """Runs on a node."""
    import ray

    def send(kind: str, message: Any) -> None:
        sent = mailbox.put.remote(share.key, attempt, kind, message)
        if kind == "checkpoint":
            ray.get(sent)  # home before training goes on: a node that is lost then is not missed

    begin, node = time.time(), ray.get_runtime_context().get_node_id()
    send("begin", node)
    found, error = train_share(share.tasks, send, checkpoint, options)
    ray.get(mailbox.put.remote(share.key, attempt, "end", node))  # messages of one sender stay in order: all are home
    return {"results": found, "error": error, "seconds": time.time() - begin, "node": node}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]
