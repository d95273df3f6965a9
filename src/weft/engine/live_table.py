"""Show a sweep as a live table on a terminal, from Events alone: members by their best validation metric.

Members on different graphs are ranked apart, since their scores do not compare.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from weft.core.event import STEERED, Event
from weft.core.settings import lower_is_better
from weft.core.units import show_loss

MOST_ROWS = 20  # a frame of 20 rows takes 20 ms of a core to draw, twice a second
COLOURS = {"running": "cyan", "finished": "green", "stopped": "green"} | dict.fromkeys(
    ("pruned", "cancelled", "preempted"), "dim"
)
GAP, LEAST_NAME = 2, 8  # characters between columns; of a name, however narrow the terminal
LEAST_BAR, MOST_BAR = 4, 28
HEADINGS = ("", "task", "epoch", "loss", "val", "best", "at", "status")


class LiveTable:
    """Shows a sweep: the best members, a line for the rest, a bar for the whole."""

    def __init__(self, console: Console) -> None:
        self._console, self._lock = console, threading.Lock()
        self._members: dict[str, dict[str, Any]] = {}
        self._whole: dict[str, Any] = {}
        self._metric, self._count, self._graphs = "", 0, ("",)
        self._preparing = "preparing"
        self._lines: list[str] = []
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=2)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, event: Event) -> None:
        """Take in one event."""
        with self._lock:
            self._take(event)
            lines, self._lines = self._lines, []
        # Without the lock: printing waits for the thread that draws, which waits for the lock.
        for line in lines:
            self._console.print(line, highlight=False)

    def _take(self, event: Event) -> None:
        if event.kind == "start":
            self._start(event)
        elif event.kind == "group":
            self._group(event.data)
        elif event.kind == "progress":
            self._whole |= {key: value for key, value in event.data.items() if key != "members"}
            for member in event.data["members"]:
                self._members.setdefault(member["task"], {}).update(member)
        elif event.kind == "end":
            self._end(event)
        elif event.kind == "preparing":
            self._preparing = event.data["message"]
        elif event.kind == "note":
            self._say(f"[yellow]note[/] {escape(event.data['message'])}")
        elif event.kind in STEERED:
            self._say(f"[yellow]{event.kind}[/] after epoch {event.data['epoch']}")

    def _say(self, line: str) -> None:
        self._lines.append(line)

    def _start(self, event: Event) -> None:
        data, graph = event.data, event.data["graph"]
        self._metric, self._count = data["metric"], data["tasks"]
        self._graphs = tuple(data.get("graphs", ())) or (graph["name"],)
        self._whole = {"done": 0, "total": data["epochs"]}
        size = f"{graph['nodes']:,} nodes, {graph['edges']:,} edges"
        where = f"{graph['name']} ({size})" if len(self._graphs) == 1 else f"{len(self._graphs)} graphs"
        self._say(f"[bold]{escape(event.task)}[/]: {data['tasks']} tasks on {escape(where)}, {data['device']}")

    def _group(self, data: Any) -> None:
        known = {key: data[key] for key in ("graph", "metric") if key in data}
        for name in data["members"]:
            self._members.setdefault(name, {"status": "running"}).update(known)
        plan = data["plan"]
        stacks = f" in {len(plan['stacks'])} stacks" if len(plan["stacks"]) > 1 else ""
        where = f" on {escape(data['graph'])}" if len(self._graphs) > 1 else ""
        count = f"{len(data['members'])} tasks"
        self._say(f"group {data['group']} of {data['groups']}{where}: {count} {plan['join']}{stacks}")
        for reason in plan["why"][:3] if data["groups"] <= 4 else ():
            self._say(f"  [dim]· {escape(reason)}[/]")

    def _end(self, event: Event) -> None:
        metrics = event.data["metrics"]
        found = {**event.data.get("last", {}), "status": event.data["status"], "epoch": metrics["epochs_run"]}
        metric = metrics.get("metric", self._metric)
        score = metrics.get(f"val_{metric}")
        if score is not None:
            found |= {f"best_val_{metric}": score, "best_epoch": metrics["best_epoch"]}
        self._members.setdefault(event.task, {}).update(found)

    # ---- drawing -------------------------------------------------------------------------------------

    def _render(self) -> RenderableType:
        with self._lock:
            if not self._members:
                return Text(self._preparing, style="dim")
            return Group(self._table(), *self._rest(), self._bar())

    def _rows(self) -> int:
        room = self._console.height - 6 if self._console.is_terminal else MOST_ROWS
        return max(3, min(MOST_ROWS, room, len(self._members)))

    def _ranked(self) -> list[list[tuple[str, dict[str, Any]]]]:
        """The members of every graph, best first; those of no known graph are with the first."""
        found: dict[str, list[tuple[str, dict[str, Any]]]] = {graph: [] for graph in self._graphs}
        for name, member in self._members.items():
            found[member["graph"] if member.get("graph") in found else self._graphs[0]].append((name, member))
        return [sorted(some, key=lambda item: -self._best(item[1])) for some in found.values()]

    def _best(self, member: dict[str, Any]) -> float:
        column = f"val_{member.get('metric', self._metric)}"
        score = member.get(f"best_{column}")
        return float("-inf") if score is None else -float(score) if lower_is_better(column) else float(score)

    def _shown(self) -> list[list[tuple[str, dict[str, Any]]]]:
        """As many of every graph as there are rows for."""
        begun = [some for some in self._ranked() if some]
        return [some[: max(1, self._rows() // len(begun))] for some in begun]

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
        for heading in HEADINGS:
            left = heading in ("task", "status")
            table.add_column(heading, justify="left" if left else "right", no_wrap=True, overflow="ellipsis")
        shown = self._shown()
        room = self._room_for_names([self._cells(r, "", m) for some in shown for r, (_, m) in enumerate(some, 1)])
        for some in shown:
            for rank, (name, member) in enumerate(some, 1):
                table.add_row(*self._cells(rank, cut(name, room), member), end_section=rank == len(some))
        return table

    def _room_for_names(self, cells: list[list[str]]) -> int:
        """What the numbers leave of a line: names are cut, numbers never."""
        columns = zip(
            *([Text.from_markup(cell).plain for cell in row] for row in (*cells, list(HEADINGS))), strict=True
        )
        widths = [max(map(len, column)) for place, column in enumerate(columns) if HEADINGS[place] != "task"]
        return max(LEAST_NAME, self._console.width - sum(widths) - GAP * (len(HEADINGS) - 1))

    def _cells(self, rank: int, name: str, member: dict[str, Any]) -> list[str]:
        status = member.get("status", "running")
        epochs = f"{member.get('epoch', 0)}/{member['epochs']}" if "epochs" in member else str(member.get("epoch", 0))
        metric = member.get("metric", self._metric)
        best = _number(member.get(f"best_val_{metric}"))
        return [
            str(rank),
            f"[bold]{escape(name)}[/]" if rank == 1 else escape(name),
            epochs,
            _number(member.get("loss")),
            _number(member.get(f"val_{metric}")),
            f"[green]{best}[/]" if rank == 1 else best,
            str(member.get("best_epoch", "")),
            f"[{COLOURS.get(status, 'red')}]{status}[/]",
        ]

    def _rest(self) -> list[Text]:
        shown = {name for some in self._shown() for name, _ in some}
        hidden = [(name, member) for name, member in self._members.items() if name not in shown]
        waiting = self._count - len(self._members)
        counts = Counter(member.get("status", "running") for _, member in hidden)
        words = [f"{count} {status}" for status, count in counts.most_common()]
        words += [f"{waiting} waiting"] if waiting > 0 else []
        return (
            [Text(f"   … and {len(hidden) + max(waiting, 0)} more: {', '.join(words)}", style="dim")] if words else []
        )

    def _bar(self) -> Table:
        done, total = self._whole.get("done", 0), max(self._whole.get("total", 1), 1)
        rate = self._whole.get("epochs_per_second", 0.0)
        left = f"{(total - done) / rate:,.0f} s left" if rate and done < total else ""
        words = [f"{done / total:.0%}", f"{done:,} of {total:,} task·epochs"]
        words += [some for some in (f"{rate:,.0f} task·epochs/s" if rate else "", left) if some]
        room = self._console.width - sum(map(len, words)) - GAP * len(words)  # the bar is short before words wrap
        bar = Table.grid(padding=(0, GAP))
        bar.add_row(
            ProgressBar(total=total, completed=done, width=max(LEAST_BAR, min(MOST_BAR, room))),
            words[0],
            *(f"[dim]{some}[/]" for some in words[1:]),
        )
        return bar


def cut(name: str, room: int) -> str:
    """``name`` in ``room`` characters: its middle goes, since names of a sweep differ at both ends."""
    if len(name) <= room:
        return name
    tail = (room - 1) // 2
    return f"{name[: room - 1 - tail]}…{name[len(name) - tail :]}"


def _number(value: Any) -> str:
    return show_loss(value) if isinstance(value, float) else ""


# ---- Show a training as a live line on a terminal, from Events alone.


class LiveDisplay:
    """Shows one run: a bar, the loss, the validation metric, its best, and the speed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("[dim]{task.fields[rate]}"),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._metric, self._epochs = "metric", 0
        self._line = self._bar.add_task("preparing", total=None, count="", numbers="", rate="")

    def __enter__(self) -> LiveDisplay:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._epochs:
            self._bar.remove_task(self._line)  # nothing was trained: leave the screen to the error
        self._bar.stop()

    def __call__(self, event: Event) -> None:
        if event.kind == "start":
            self._start(event)
        elif event.kind == "progress":
            self._show(event.data)
        elif event.kind == "finish":
            self._bar.update(self._line, total=event.data["metrics"]["epochs_run"])
        elif event.kind == "preparing" and not self._epochs:
            self._bar.update(self._line, description=escape(event.data["message"]))
        elif event.kind == "note":
            self._console.print(f"[yellow]note[/] {escape(event.data['message'])}", highlight=False)
        elif event.kind in STEERED:
            self._console.print(f"[yellow]{event.kind}[/] after epoch {event.data['epoch']}", highlight=False)

    def _start(self, event: Event) -> None:
        data = event.data
        graph = data["graph"]
        self._metric, self._epochs = data["metric"], data["epochs"]
        size = f"{graph['nodes']:,} nodes, {graph['edges']:,} edges"
        self._console.print(
            f"[bold]{escape(event.task)}[/] on {escape(graph['name'])} ({size}), "
            f"{data['parameters']:,} parameters, {data['device']}",
            highlight=False,
        )
        for reason in data["plan"]["why"]:
            self._console.print(f"  [dim]· {escape(reason)}[/]", highlight=False)
        self._bar.update(self._line, description=escape(event.task), total=self._epochs)

    def _show(self, data: Any) -> None:
        words = [f"loss {show_loss(data['loss'])}"] if "loss" in data else []
        value, best = data.get(f"val_{self._metric}"), data.get(f"best_val_{self._metric}")
        if value is not None:
            words.append(f"val {value:.4f}")
        if best is not None:
            words.append(f"best [green]{best:.4f}[/] @ {data['best_epoch']}")
        self._bar.update(
            self._line,
            completed=data["epoch"],
            count=f"{data['epoch']}/{self._epochs}",
            numbers="  ".join(words),
            rate=f"{data['epochs_per_second']:,.0f} epochs/s",
        )
