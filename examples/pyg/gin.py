"""PyG's GIN with batch norms, on the nodes of one graph: `python examples/pyg/gin.py cora.npz`.

Lines: 2 with Weft, 4 by hand and 15 in its loop.
"""

import torch
from loop import compare, train
from torch_geometric.nn import GIN

import weft

MODEL = {"hidden_channels": 64, "num_layers": 2, "dropout": 0.5, "norm": "batch_norm"}


def with_weft(data, seed):
    task = weft.Task(data, GIN, **MODEL, learning_rate=0.01, weight_decay=5e-4, epochs=100, seed=seed)
    return weft.run(task, device="cpu", progress=False).metrics["test_accuracy"]


def by_hand(data, seed):
    torch.manual_seed(seed)
    model = GIN(data.num_features, out_channels=int(data.y.max()) + 1, **MODEL)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    return train(model, data, optimizer, epochs=100)


if __name__ == "__main__":
    compare(with_weft, by_hand)
