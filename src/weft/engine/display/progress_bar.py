"""Show a training as a live line on a terminal, from Events alone."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from weft.core.event import STEERED, Event
from weft.core.units import show_loss


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
