"""The outcome of an epoch: evaluation, metrics, the best weights and the history."""
