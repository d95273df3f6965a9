"""Options that commands have in common."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.core.errors import SpecError

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


def ranks_for(gpus: int | None, ranks: int | None, device: str) -> tuple[int, str]:
    """How many ranks ``--gpus`` or ``--ranks`` ask for, and on which device."""
    for name, number in (("--gpus", gpus), ("--ranks", ranks)):
        if number is not None and number < 1:
            raise SpecError(f"{name} {number}: must be at least 1")
    if gpus is None:
        return ranks or 1, device
    if ranks is not None:
        raise SpecError(f"--gpus {gpus} and --ranks {ranks}: --gpus starts one rank per GPU; give one of the two")
    if device not in ("auto", "cuda"):
        raise SpecError(f"--gpus {gpus} with --device {device}: give one of the two, or --ranks {gpus}")
    import torch

    there = torch.cuda.device_count()
    if gpus > there:
        instead = f"--ranks {gpus} --device {'cuda:0' if there else 'cpu'}"
        raise SpecError(f"--gpus {gpus}: this machine has {there} GPUs; {instead} lets ranks share what there is")
    return gpus, "cuda"
