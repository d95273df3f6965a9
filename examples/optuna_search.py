"""A study of Optuna trains its trials in stacks: TPE chooses them, successive halving ends those that do poorly."""

import argparse

import optuna

import weft

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("graph", nargs="?", default="demo")
parser.add_argument("--trials", type=int, default=256)
parser.add_argument("--width", type=int, default=64, help="trials that train at once")
parser.add_argument("--epochs", type=int, default=200)
args = parser.parse_args()

space = weft.Sweep(
    args.graph,
    model=["gcn", "sage"],
    layers=[2, 3, 4],
    hidden=[16, 32, 64, 128],
    lr=weft.loguniform(1e-3, 1e-1),
    weight_decay=weft.loguniform(1e-5, 1e-2),
    dropout=weft.uniform(0, 0.8),
    epochs=args.epochs,
)
study = optuna.create_study(
    direction="maximize",
    sampler=optuna.samplers.TPESampler(seed=0, multivariate=True, constant_liar=True),
    pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=8, reduction_factor=3),
)
result = weft.run(space, options=weft.RunOptions(tuner=study, trials=args.trials, width=args.width))
best = result[study.best_trial.user_attrs["weft_trial"]].metrics
print(f"{study.best_value:.3f} on validation nodes, {best['test_accuracy']:.3f} on test nodes: {study.best_params}")
