"""The same Optuna study through Weft's stacks and through PyG processes: best score and wall clock beside each other.

    python -m benchmarks.suites.optuna_search --data DIR --graphs cora,pubmed --studies 5 --pyg-studies 1 --out FILE

TPE (multivariate, with constant liar) and successive halving choose and end trials on both sides, with one seed per
study. On Weft's side ``--width`` trials train at once in stacks; its seconds are those of the whole run: planning,
capturing, all trials. On PyG's side ``--workers`` long-lived processes, under NVIDIA's Multi-Process Service on a GPU,
take one trial after another from a study in this process; they have loaded PyG, the graph and the device, and have
trained a warm-up trial, before the clock starts. Both sides evaluate every ``--eval-every`` epochs. They train unlike
numbers of trials at once, so that a sampler knows more of the past on PyG's side: best scores are alike, not equal.
"""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import optuna
import torch

import weft
from benchmarks.baselines.epochs import dense_features, train_pyg
from benchmarks.harness.graphs import read_graph
from benchmarks.harness.recorder import NotHere, Recorder, common_arguments, listed
from weft.graph.graph import Graph
from weft.serve.worker_pool import MPS

READY_SECONDS = 180.0
WARM = {"model": "gcn", "layers": 2, "hidden": 64, "lr": 0.01, "weight_decay": 5e-4, "dropout": 0.5}
SPACE: dict[str, Any] = {
    "model": ["gcn", "sage"],
    "layers": [2, 3, 4],
    "hidden": [16, 32, 64, 128],
    "lr": weft.loguniform(1e-3, 1e-1),
    "weight_decay": weft.loguniform(1e-5, 1e-2),
    "dropout": weft.uniform(0.0, 0.8),
}


def new_study(seed: int) -> optuna.Study:
    """The study of both sides."""
    sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=8, reduction_factor=3)
    return optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner)


def settings_of(trial: optuna.Trial) -> dict[str, Any]:
    """One trial out of the space, as a script with Optuna draws it."""
    drawn: dict[str, Any] = {}
    for name, source in SPACE.items():
        if isinstance(source, list):
            drawn[name] = trial.suggest_categorical(name, source)
        else:
            drawn[name] = trial.suggest_float(name, source.low, source.high, log=source.log)
    return drawn


def outcome(study: optuna.Study, seconds: float, test: float, epochs: int) -> dict[str, Any]:
    """What both sides say of a study."""
    states = [trial.state.name for trial in study.trials]
    counts = {"trials": len(states), "pruned": states.count("PRUNED"), "failed": states.count("FAIL")}
    return {"val": study.best_value, "test": test, "seconds": round(seconds, 2), "epochs": epochs, **counts}


def through_weft(graph: Graph, seed: int, args: Namespace) -> dict[str, Any]:
    """The study as a tuner of Weft."""
    study, sweep = new_study(seed), weft.Sweep(graph, **SPACE, epochs=args.epochs, eval_every=args.eval_every)
    options = weft.RunOptions(tuner=study, trials=args.trials, width=args.width)
    begin = time.perf_counter()
    result = weft.run(sweep, options=options, device=str(graph.device), progress=False)
    seconds = time.perf_counter() - begin
    best = result[study.best_trial.user_attrs["weft_trial"]].metrics
    epochs = sum(each.metrics.get("epochs_run", 0) for each in result)
    return outcome(study, seconds, best["test_accuracy"], epochs)


@contextmanager
def pyg_workers(name: str, args: Namespace, wanted: int) -> Iterator[list[Connection]]:
    """Processes that are ready for trials on the graph ``name``, by their pipes."""
    service, context = MPS([args.device], wanted), get_context("spawn")
    if not service.start() and args.device.startswith("cuda"):
        raise NotHere("NVIDIA's Multi-Process Service could not be started")
    pipes, processes = [], []
    try:
        with patch.dict(os.environ, service.environment):
            for _ in range(wanted):
                here, there = context.Pipe()
                arguments = (there, args.device, args.data, name, args.epochs, args.eval_every)
                processes.append(context.Process(target=serve, args=arguments, daemon=True))
                processes[-1].start()
                there.close()
                pipes.append(here)
        for pipe in pipes:
            if not pipe.poll(READY_SECONDS):
                raise TimeoutError(f"a PyG process took over {READY_SECONDS:.0f} s to begin")
            pipe.recv()
        yield pipes
    finally:
        for process, pipe in zip(processes, pipes, strict=False):
            process.kill()
            process.join()
            pipe.close()
        service.stop()


def serve(pipe: Connection, device: str, data: Path, name: str, epochs: int, eval_every: int) -> None:
    """A process: train every trial that comes, and report as it trains."""
    torch.set_num_threads(1)  # the processes share the processor
    graph = read_graph(data, name).to(torch.device(device))
    x, edges = dense_features(graph), graph.edge_index()

    def train(settings: dict[str, Any], length: int, stops: Any) -> Any:
        return train_pyg(
            weft.Task(graph, **settings, epochs=length, eval_every=eval_every), graph, x, edges, stops=stops
        )

    def stops(epoch: int, val: float) -> bool:
        pipe.send((epoch, val))
        return bool(pipe.recv())

    train(WARM, 2 * eval_every, lambda epoch, val: False)
    pipe.send("ready")
    while True:
        try:
            trained = train(pipe.recv(), epochs, stops)
            pipe.send({"val": trained.val, "test": trained.test, "epochs": trained.epochs})
        except EOFError:
            return
        except RuntimeError as error:  # out of memory, for example
            pipe.send({"error": str(error).splitlines()[0]})


def through_pyg(name: str, seed: int, args: Namespace) -> dict[str, Any]:
    """The study over the processes: a process that is free takes the next trial."""
    study, tests, epochs, begun = new_study(seed), {}, 0, 0
    running: dict[Any, optuna.Trial] = {}

    def begin_next(pipe: Connection) -> int:
        if begun < args.trials:
            running[pipe] = study.ask()
            pipe.send(settings_of(running[pipe]))
        return begun + 1

    with pyg_workers(name, args, args.workers) as pipes:
        begin = time.perf_counter()
        for pipe in pipes:
            begun = begin_next(pipe)
        while running:
            for pipe in wait(list(running)):
                answer, trial = pipe.recv(), running[pipe]
                if isinstance(answer, tuple):
                    trial.report(answer[1], answer[0])
                    stop = trial.should_prune()
                    trial.set_user_attr("stopped", stop)
                    pipe.send(stop)
                    continue
                state = optuna.trial.TrialState
                if "error" in answer:
                    study.tell(trial, state=state.FAIL)
                elif trial.user_attrs.get("stopped"):
                    study.tell(trial, state=state.PRUNED)
                else:
                    study.tell(trial, answer["val"])
                tests[trial.number], epochs = answer.get("test"), epochs + answer.get("epochs", 0)
                del running[pipe]
                begun = begin_next(pipe)
        seconds = time.perf_counter() - begin
    return outcome(study, seconds, tests[study.best_trial.number], epochs)


def table(cells: list[dict[str, Any]]) -> str:
    """A row per study and side."""
    heads = ("graph", "study", "side", "best validation", "its test", "seconds", "trials", "pruned", "epochs")
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for cell in cells:
        if cell["status"] == "ok":
            shown = [f"{cell['val']:.4f}", f"{cell['test']:.4f}", f"{cell['seconds']:.1f}"]
            counts = [str(cell[key]) for key in ("trials", "pruned", "epochs")]
            rows.append(f"| {' | '.join([cell['graph'], str(cell['study']), cell['side'], *shown, *counts])} |")
    return "\n".join(rows)


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the npz files")
    parser.add_argument("--graphs", default="cora,pubmed")
    parser.add_argument("--sides", default="weft,pyg")
    parser.add_argument("--studies", type=int, default=3, help="how many, each with a seed of its own")
    parser.add_argument("--pyg-studies", type=int, default=1_000, help="at most so many of them through PyG")
    parser.add_argument("--trials", type=int, default=256)
    parser.add_argument("--width", type=int, default=64, help="trials that train at once in Weft")
    parser.add_argument("--workers", type=int, help="PyG processes: 8 on a GPU, else 2")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--eval-every", type=int, default=5)
    args = parser.parse_args()
    args.workers = args.workers or (8 if args.device.startswith("cuda") else 2)
    return args


def main() -> None:
    """Every study on every graph through both sides, then the table."""
    args = arguments()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    recorder = Recorder("optuna_search", args)
    for name in listed(args.graphs):
        graph = recorder.prepare(f"graph {name}", lambda n=name: read_graph(args.data, n).to(recorder.device))
        for seed in range(args.studies if graph is not None else 0):
            for side in listed(args.sides):
                key = {"graph": name, "study": seed, "side": side}
                if side != "weft" and seed >= args.pyg_studies:
                    continue
                if side == "weft":
                    recorder.cell(key, lambda g=graph, s=seed: through_weft(g, s, args))
                else:
                    recorder.cell(key, lambda n=name, s=seed: through_pyg(n, s, args))
    recorder.save(workers=args.workers, width=args.width, eval_every=args.eval_every)
    print(table(recorder.cells))


if __name__ == "__main__":
    main()
