"""Options that commands have in common."""

from __future__ import annotations

from typing import Annotated

import typer

Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Send steps through Inductor, or never do.",
        show_default="on a GPU, where the plan expects it to repay",
    ),
]
Weave = Annotated[
    bool | None,
    typer.Option(
        "--weave/--no-weave",
        help="Merge tasks of different structure into one step, or train them in turn.",
        show_default="beside each other on a GPU that they do not fill",
    ),
]
