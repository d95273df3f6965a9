"""Options that commands have in common."""

from __future__ import annotations

from typing import Annotated

import typer

Weave = Annotated[
    bool | None,
    typer.Option(
        "--weave/--no-weave",
        help="Merge tasks of different structure into one step, or train them in turn.",
        show_default="beside each other on a GPU that they do not fill",
    ),
]
