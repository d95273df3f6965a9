"""PyG's GAT, eight heads of eight numbers: `python examples/pyg/gat.py cora.npz`.

Lines: 2 with Weft, 4 by hand and 15 in its loop.
"""

import torch
from loop import compare, train
from torch_geometric.nn import GAT

import weft

MODEL = {"hidden_channels": 64, "num_layers": 2, "heads": 8, "dropout": 0.6}


def with_weft(data, seed):
    task = weft.Task(data, GAT, **MODEL, learning_rate=0.005, weight_decay=5e-4, epochs=200, seed=seed)
    return weft.run(task, device="cpu", progress=False).metrics["test_accuracy"]


def by_hand(data, seed):
    torch.manual_seed(seed)
    model = GAT(data.num_features, out_channels=int(data.y.max()) + 1, **MODEL)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    return train(model, data, optimizer, epochs=200)


if __name__ == "__main__":
    compare(with_weft, by_hand)
