"""Check docs/papers.md: a row names a file that exists, a setting that can be given and figures that were measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import weft

ROOT = Path(__file__).parents[1]
PAPERS = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAPERS.splitlines() if line.startswith("| ")]
ROWS = [row for row in ROWS if row[0] != "mechanism"]
BY_NAME = pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
GONE = ("deleted", "not there")  # in place of a file: mechanisms that Weft does not have, and says so
WITHOUT = ("-", "always", "a rule instead")  # what a setting's cell begins with if there is none to give


def test_every_table_has_six_columns_without_empty_cells():
    assert len(ROWS) > 40
    assert {len(row) for row in ROWS} == {6}, "mechanism, file, setting, default, measured, paper"
    assert all(cell for row in ROWS for cell in row)


@BY_NAME
def test_a_row_names_one_file_that_exists(row):
    if row[1] not in GONE:
        assert re.fullmatch(r"`src/weft/[\w/]+\.py`", row[1])
        assert (ROOT / row[1].strip("`")).is_file()


@BY_NAME
def test_a_row_names_a_setting_that_can_be_given(row):
    """As it stands, in Python (``...`` is for an object of the user's) or as an option of a command."""
    from weft.cli.serve import SERVED
    from weft.sched.policies import POLICIES

    python = re.findall(r"`((?:RunOptions|Placement|Task)\(.*?\))`", row[2])
    shell = re.findall(r"`weft (serve|plan) (--[a-z-]+)(?: (\w+))?`", row[2])
    assert python or shell or row[2].startswith(WITHOUT)
    for setting in python:
        if "=..." in setting:
            assert setting.partition("(")[2].partition("=")[0] in weft.RunOptions.__dataclass_fields__
        elif setting.startswith("Task"):
            assert weft.Task(graph="demo", **eval(setting.replace("Task", "dict")))
        else:
            assert eval(setting, {"RunOptions": weft.RunOptions, "Placement": weft.Placement}) is not None
    for command, flag, value in shell:
        if command == "serve":
            assert flag in {option.flag or f"--{option.name.replace('_', '-')}" for option in SERVED}
            assert flag != "--policy" or value in POLICIES
        else:
            assert flag == "--simulate"


def cells(suite: str, **values: object) -> list[dict]:
    """The cells of a results file that have these values."""
    found = json.loads((ROOT / "benchmarks" / "results" / f"{suite}.json").read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["status"] == "ok" and all(cell.get(k) == v for k, v in values.items())]


def only(suite: str, figure: str, **values: object) -> float:
    """The figure of the one cell that has these values."""
    (cell,) = cells(suite, **values)
    return cell[figure]


def gain(suite: str, figure: str, before: dict, after: dict, **values: object) -> float:
    """How many times as long ``before`` takes as ``after``."""
    return only(suite, figure, **values, **before) / only(suite, figure, **values, **after)


def on_gcn(name: str) -> list[str]:
    """Makespan and mean completion time of a policy on the gcn queue over those of one at a time."""
    return [
        f"{gain('queues', figure, {'mode': name}, {'mode': 'pipeswitch'}, queue='gcn'):.2f}"
        for figure in ("makespan", "mean_jct")
    ]


def estimates() -> list[str]:
    errors = {
        kind: [
            abs(cell["estimated_allocated"] / cell["allocated"] - 1)
            for cell in cells("estimates", measured="memory", set=kind)
        ]
        for kind in ("queues", "modules", "opaque")
    }
    near = [error <= 0.01 for kind in ("queues", "modules") for error in errors[kind]]
    worst = {kind: max(values) for kind, values in errors.items()}
    return [
        f"{len(errors['queues'])} trainings {worst['queues']:.2%}".replace("%", " %"),
        f"{sum(near)} of {len(near)}",
        f"off by {worst['modules']:.1%}".replace("%", " %"),
        f"up to {worst['opaque']:.0%}".replace("%", " %"),
    ]


def out_of_memory() -> list[str]:
    paper = [cell["out_of_memory"] for cell in cells("queues") if "done" in cell and cell["mode"] != "pyg"]
    team = cells("team_queue")
    return [
        f"{sum(paper)} out of memory in {20 * len(paper)}",
        f"{sum(cell['out_of_memory'] for cell in team)} in {sum(cell['tasks'] for cell in team)}",
    ]


def one_kernel() -> list[str]:
    """16 tasks: one kernel of Weft's, in the faster order of the rows, over 16 of cuSPARSE."""
    fastest = min(cell["ms"] for cell in cells("multi_kernels", tasks=16, side="batched"))
    return [f"{only('multi_kernels', 'ms', tasks=16, side='separate') / fastest:.2f}x"]


def per_task(model: str, tasks: int) -> str:
    arxiv = {"shape": "arxiv", "model": model, "precision": "fp32", "side": "weft"}
    return f"{gain('sweep', 'ms', {'tasks': 1}, {'tasks': tasks}, **arxiv):.2f}x"


def sampler(side: str) -> list[float]:
    """Milliseconds at fan-outs 10, 15 and 30."""
    hop = {"work": "one hop", "shape": "products", "seeds": 200_000}
    return [only("sampling", "ms", side=side, fanout=fanout, **hop) for fanout in (10, 15, 30)]


def over_reservoir(side: str) -> list[str]:
    return [f"{base / ms:.2f}x" for base, ms in zip(sampler("reservoir"), sampler(side), strict=True)]


def sampled(figure: str, case: str, tasks: int = 1) -> float:
    return only("sampled_epoch", figure, shape="products", case=case, tasks=tasks, precision="fp32")


def depths(side: str) -> str:
    """GCN of 2, 2, 3 and 4 layers: one task after another over ``side``."""
    return f"{gain('heterogeneous', 'ms', {'side': 'sequence'}, {'side': side}, case='depths'):.2f}x"


def six(side: str) -> str:
    """Six tasks on the demo graph: one group after another over ``side``."""
    about = {"setting": "weave", "case": "demo, six"}
    return f"{gain('settings', 'measured_ms', {'side': 'off'}, {'side': side}, **about):.2f}x"


def interleaving(side: str, without: str) -> list[str]:
    """The least and the most that ``side`` gains over ``without``, of all shapes that have both."""
    times = {
        (cell["shape"], cell["features"]): cell["ms"] for cell in cells("sharded", side=without) if cell.get("features")
    }
    pairs = [(cell["ms"], times.get((cell["shape"], cell.get("features")))) for cell in cells("sharded", side=side)]
    gains = [before / after for after, before in pairs if before]
    return [f"{min(gains):.2f}x", f"{max(gains):.2f}x"]


def simulated() -> list[str]:
    from benchmarks.suites.division import verdicts

    return [verdicts(cells("division"))[0][2].partition(",")[0]]


FIGURES = {  # begin of a mechanism's name to what its row must say
    "peak memory": estimates,
    "safety condition": out_of_memory,
    "Base:": lambda: on_gcn("base"),
    "LMCF:": lambda: on_gcn("lmcf"),
    "BMC ": lambda: on_gcn("bmc"),
    "spatial sharing": lambda: on_gcn("mps"),
    "temporal sharing": lambda: [f"{only('queues', 'makespan', queue='gcn', mode='pipeswitch'):.2f} s"],
    "beyond the paper: no barriers": lambda: [
        *on_gcn("backfill"),
        *(f"{only('team_queue', 'makespan', mode=mode):.1f} s" for mode in ("backfill", "lmcf")),
    ],
    "one SpMM": one_kernel,
    "stacked steps": lambda: [per_task("gcn", 32), per_task("gin", 16), per_task("gat", 16)],
    "stacks of different": lambda: [depths("concurrent")],
    "operators matched": lambda: [depths("woven"), six("merged"), six("concurrent")],
    "stacks one after": lambda: [depths("stacks")],
    "pull-and-push": lambda: [
        f"{gain('multi_kernels', 'ms', {'side': 'separate'}, {'side': 'pull-push'}, part='passes'):.3f}x"
    ],
    "exact sampling": lambda: [f"{ms:.3f}" for ms in sampler("default")],
    "reservoir": lambda: [f"{ms:.3f}" for ms in sampler("reservoir")],
    "Algorithm 1": lambda: [
        *(f"{ms:.3f}" for ms in sampler("paper")),
        *over_reservoir("paper"),
        *over_reservoir("paper: classes, S"),
    ],
    "sampled training": lambda: [
        f"{sampled('epoch_seconds', 'gpu'):.3f} s",
        f"{sampled('epoch_seconds', 'eager'):.2f} s",
    ],
    "the next batch": lambda: [f"{sampled('ms', case):.2f}" for case in ("host, pipelined", "host, serial")],
    "feature and neighbour": lambda: [
        f"{sampled('epoch_seconds', 'cached by presampling, pipelined'):.3f}",
        f"{sampled('epoch_seconds', 'cached by degree, pipelined'):.3f}",
        f"{sampled('epoch_seconds', 'host, serial'):.2f}",
    ],
    "tasks of one sampling": lambda: [f"{sampled('ms', 'gpu', 8) / sampled('ms', 'gpu'):.2f} times"],
    "interleaved kernel": lambda: interleaving("interleaved", "apart"),
    "beyond the paper: tiles": lambda: interleaving("streamed", "streamed apart"),
    "Equations 1 to 3": lambda: [f"{only('sharded', 'best_ms', side='tuner'):.2f} ms"],
    "simulator": simulated,
}


@pytest.mark.parametrize("name", FIGURES)
def test_measured_figures_are_those_of_the_results(name):
    (row,) = (row for row in ROWS if row[0].startswith(name))
    for figure in FIGURES[name]():
        assert figure in row[4]
