"""The training loop that a script with PyG has: what the other scripts of this folder compare Weft with."""

from __future__ import annotations

import sys

import torch
from torch.nn import functional as F

import weft


def read_data():
    """The graph of the command line (``cora.npz``), or the one that comes with Weft, as PyG's ``Data``."""
    return weft.load(sys.argv[1] if len(sys.argv) > 1 else "demo").to_pyg()


def train(model, data, optimizer, epochs, loader=None):
    """Test accuracy of the epoch with the best validation accuracy; ``loader``: batches instead of the whole graph."""
    best = test = 0.0
    for _ in range(epochs):
        model.train()
        for batch in [data] if loader is None else loader:
            rows = batch.train_mask if loader is None else slice(batch.batch_size)
            optimizer.zero_grad()
            F.cross_entropy(call(model, batch)[rows], batch.y[rows]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = call(model, data).argmax(-1) == data.y
        val = right[data.val_mask].float().mean().item()
        if val > best:
            best, test = val, right[data.test_mask].float().mean().item()
    return test


def call(model, data):
    """The logits of all nodes."""
    types = () if getattr(data, "edge_type", None) is None else (data.edge_type,)
    return model(data.x, data.edge_index, *types)


def compare(with_weft, by_hand, seed=0):
    """Print the test accuracy of both."""
    data = read_data()
    print(f"with Weft {with_weft(data, seed):.3f}, by hand {by_hand(data, seed):.3f}")
