"""Show a run on a terminal, from Events alone: a sweep as a live table, one training as a live line.

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
from weft.engine.display import graph_words, progress_words

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
        self._reasons: set[str] = set()  # that were shown: groups often have the same
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
        data, kind = event.data, event.kind
        if kind == "start":
            graph = data["graph"]
            self._metric, self._count = data["metric"], data["tasks"]
            self._graphs = tuple(data.get("graphs", ())) or (graph["name"],)
            self._whole = {"done": 0, "total": data["epochs"]}
            where = graph_words(graph) if len(self._graphs) == 1 else f"{len(self._graphs)} graphs"
            line = f"[bold]{escape(event.task)}[/]: {data['tasks']} tasks on {escape(where)}, {data['device']}"
            self._lines.append(line)
        elif kind == "group":
            shared = {key: data[key] for key in ("graph", "metric") if key in data}
            for name in data["members"]:
                self._members.setdefault(name, {"status": "running"}).update(shared)
            plan = data["plan"]
            stacks = f" in {len(plan['stacks'])} stacks" if len(plan["stacks"]) > 1 else ""
            where = f" on {escape(data['graph'])}" if len(self._graphs) > 1 else ""
            count = f"{data['rows']} rows" if "rows" in data else f"{len(data['members'])} tasks"
            self._lines.append(f"group {data['group']} of {data['groups']}{where}: {count} {plan['join']}{stacks}")
            reasons = [why for why in plan["why"][:3] if why not in self._reasons] if data["groups"] <= 4 else []
            self._reasons.update(reasons)
            self._lines += [f"  [dim]· {escape(reason)}[/]" for reason in reasons]
        elif kind == "trial":
            self._members.setdefault(event.task, {}).update(status="running", epochs=data["epochs"])
        elif kind == "progress":
            self._whole |= {key: value for key, value in data.items() if key != "members"}
            for member in data["members"]:
                self._members.setdefault(member["task"], {}).update(member)
        elif kind == "end":
            metrics = data["metrics"]
            row = {**data.get("last", {}), "status": data["status"], "epoch": metrics["epochs_run"]}
            metric = metrics.get("metric", self._metric)
            score = metrics.get(f"val_{metric}")
            if score is not None:
                row |= {f"best_val_{metric}": score, "best_epoch": metrics["best_epoch"]}
            self._members.setdefault(event.task, {}).update(row)
        elif kind == "preparing":
            self._preparing = data["message"]
        else:
            self._lines += message_lines(event)

    # ---- Drawing

    def _render(self) -> RenderableType:
        with self._lock:
            if not self._members:
                return Text(self._preparing, style="dim")
            # The best members of every graph, as many as there are rows; those of no known graph are with the first.
            by_graph: dict[str, list[tuple[str, dict[str, Any]]]] = {graph: [] for graph in self._graphs}
            for name, member in self._members.items():
                graph = member.get("graph")
                by_graph[graph if graph in by_graph else self._graphs[0]].append((name, member))
            ranked = [
                sorted(members, key=lambda item: -self._best(item[1])) for members in by_graph.values() if members
            ]
            room = self._console.height - 6 if self._console.is_terminal else MOST_ROWS
            rows = max(3, min(MOST_ROWS, room, len(self._members)))
            shown = [members[: max(1, rows // len(ranked))] for members in ranked]
            names = {name for rows in shown for name, _ in rows}
            hidden = [member for name, member in self._members.items() if name not in names]
            waiting = max(self._count - len(self._members), 0)
            counts = Counter(member.get("status", "running") for member in hidden)
            words = [f"{count} {status}" for status, count in counts.most_common()]
            words += [f"{waiting} waiting"] if waiting else []
            more = f"   … and {len(hidden) + waiting} more: {', '.join(words)}"
            return Group(self._table(shown), *([Text(more, style="dim")] if words else []), self._bar())

    def _best(self, member: dict[str, Any]) -> float:
        column = f"val_{member.get('metric', self._metric)}"
        score = member.get(f"best_{column}")
        return float("-inf") if score is None else -float(score) if lower_is_better(column) else float(score)

    def _table(self, shown: list[list[tuple[str, dict[str, Any]]]]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
        for heading in HEADINGS:
            side = "left" if heading in ("task", "status") else "right"
            table.add_column(heading, justify=side, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
        # Names are cut to the width that the numbers leave of a line; numbers never are.
        cells = [self._cells(rank, "", member) for rows in shown for rank, (_, member) in enumerate(rows, 1)]
        plain = [[Text.from_markup(cell).plain for cell in row] for row in (*cells, list(HEADINGS))]
        widths = [max(map(len, column)) for column in zip(*plain, strict=True)]
        numbers = sum(width for width, heading in zip(widths, HEADINGS, strict=True) if heading != "task")
        room = max(LEAST_NAME, self._console.width - numbers - GAP * (len(HEADINGS) - 1))
        for rows in shown:
            for rank, (name, member) in enumerate(rows, 1):
                table.add_row(*self._cells(rank, cut(name, room), member), end_section=rank == len(rows))
        return table

    def _cells(self, rank: int, name: str, member: dict[str, Any]) -> list[str]:
        status = member.get("status", "running")
        epochs = f"{member.get('epoch', 0)}/{member['epochs']}" if "epochs" in member else str(member.get("epoch", 0))
        metric = member.get("metric", self._metric)
        values = [member.get(key) for key in ("loss", f"val_{metric}", f"best_val_{metric}")]
        loss, value, best = (show_loss(number) if isinstance(number, float) else "" for number in values)
        return [
            str(rank),
            f"[bold]{escape(name)}[/]" if rank == 1 else escape(name),
            epochs,
            loss,
            value,
            f"[green]{best}[/]" if rank == 1 else best,
            str(member.get("best_epoch", "")),
            f"[{COLOURS.get(status, 'red')}]{status}[/]",
        ]

    def _bar(self) -> Table:
        done, total = self._whole.get("done", 0), max(self._whole.get("total", 1), 1)
        rate = self._whole.get("epochs_per_second", 0.0)
        words = [f"{done / total:.0%}", f"{done:,} of {total:,} task·epochs"]
        words += [f"{rate:,.0f} task·epochs/s"] if rate else []
        words += [f"{(total - done) / rate:,.0f} s left"] if rate and done < total else []
        room = self._console.width - sum(map(len, words)) - GAP * len(words)  # the bar is short before words wrap
        bar = Table.grid(padding=(0, GAP))
        bar.add_row(
            ProgressBar(total=total, completed=done, width=max(LEAST_BAR, min(MOST_BAR, room))),
            words[0],
            *(f"[dim]{word}[/]" for word in words[1:]),
        )
        return bar


def cut(name: str, room: int) -> str:
    """``name`` in ``room`` characters: its middle goes, since names of a sweep differ at both ends."""
    if len(name) <= room:
        return name
    tail = (room - 1) // 2
    return f"{name[: room - 1 - tail]}…{name[len(name) - tail :]}"


def message_lines(event: Event) -> list[str]:
    """The line of a note, or of a run that was paused, resumed or changed."""
    if event.kind == "note":
        return [f"[yellow]note[/] {escape(event.data['message'])}"]
    return [f"[yellow]{event.kind}[/] after epoch {event.data['epoch']}"] if event.kind in STEERED else []


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
        data, kind, lines = event.data, event.kind, message_lines(event)
        if kind == "start":
            self._metric, self._epochs = data["metric"], data["epochs"]
            where = f"[bold]{escape(event.task)}[/] on {escape(graph_words(data['graph']))}"
            lines = [f"{where}, {data['parameters']:,} parameters, {data['device']}"]
            lines += [f"  [dim]· {escape(reason)}[/]" for reason in data["plan"]["why"]]
            self._bar.update(self._line, description=escape(event.task), total=self._epochs)
        elif kind == "progress":
            self._bar.update(
                self._line,
                completed=data["epoch"],
                count=f"{data['epoch']}/{self._epochs}",
                numbers="  ".join(progress_words(data, self._metric, "best [green]{:.4f}[/] @ {}")),
                rate=f"{data['epochs_per_second']:,.0f} epochs/s",
            )
        elif kind == "finish":
            self._bar.update(self._line, total=data["metrics"]["epochs_run"])
        elif kind == "preparing" and not self._epochs:
            self._bar.update(self._line, description=escape(data["message"]))
        for line in lines:
            self._console.print(line, highlight=False)
