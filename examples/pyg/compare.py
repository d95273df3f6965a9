"""All scripts of this folder over several seeds: `python examples/pyg/compare.py cora.npz 5`.

Prints test accuracies with Weft and by hand, their difference in standard errors, and the seconds of a training.
"""

import sys
import time
from importlib import import_module
from statistics import mean, stdev

from loop import read_data

SCRIPTS = ("gcn", "gat", "gin", "sage", "rgcn")


def outcomes(train, data, seeds):
    """Accuracies and seconds, one of each per seed; what is compiled once is compiled before."""
    train(data.clone(), seeds)
    accuracies, seconds = [], []
    for seed in range(seeds):
        begin = time.perf_counter()
        accuracies.append(train(data.clone(), seed))
        seconds.append(time.perf_counter() - begin)
    return accuracies, seconds


def standard_errors(ours, theirs):
    """The difference of two means in standard errors of it."""
    error = ((stdev(ours) ** 2 + stdev(theirs) ** 2) / len(ours)) ** 0.5
    return abs(mean(ours) - mean(theirs)) / max(error, 1e-9)


def main():
    data, seeds = read_data(), int(sys.argv[2]) if len(sys.argv) > 2 else 3
    for name in SCRIPTS:
        script = import_module(name)
        (ours, fast), (theirs, slow) = (outcomes(f, data, seeds) for f in (script.with_weft, script.by_hand))
        apart = f"{standard_errors(ours, theirs):.1f} standard errors apart"
        print(f"{name}: {mean(ours):.3f} with Weft in {mean(fast):.2f} s, ", end="")
        print(f"{mean(theirs):.3f} by hand in {mean(slow):.2f} s, {apart}")


if __name__ == "__main__":
    main()
