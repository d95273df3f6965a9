"""Tuners for tests: settings from a list, and what a tuned run is compared with."""

from __future__ import annotations

import random

import weft

SPACE = {
    "lr": weft.loguniform(1e-3, 5e-2),
    "hidden": [4, 8],
    "dropout": [0.0, 0.5],
    "seed": weft.uniform(0, 1000),
    "epochs": [4, 7],
}


class Listed:
    """Asks for the settings of a list, in order; ``stops`` says which trials end at which epoch."""

    every = 2

    def __init__(self, settings, stops=()):
        self.settings, self.stops, self.calls = list(settings), dict(stops), []

    def ask(self, n):
        asked, self.settings = self.settings[:n], self.settings[n:]
        return asked

    def report(self, name, epoch, row):
        self.calls.append((name, epoch, row))

    def stop(self):
        seen = {name: epoch for name, epoch, _ in self.calls}
        return [name for name in list(self.stops) if seen.get(name, 0) >= self.stops[name] and self.stops.pop(name)]

    def tell(self, name, summary):
        self.calls.append((name, summary["status"], summary))


def drawn(count, seed=0, space=SPACE):
    """Settings out of ``space``, with seeds of their own."""
    stream = random.Random(seed)

    def value(source):
        return stream.choice(source) if isinstance(source, list) else source.at(stream.random(), False)

    return [{**{key: value(source) for key, source in space.items()}, "seed": number} for number in range(count)]


def tuned(graph, settings, width, tuner=None, space=SPACE, **options):
    """The result of trials with ``settings``, in order."""
    run = options.pop("run", {})
    choose = weft.RunOptions(tuner=tuner or Listed(settings), trials=len(settings), width=width, **options)
    return weft.run(weft.Sweep(graph, **space), options=choose, device="cpu", progress=False, **run)
