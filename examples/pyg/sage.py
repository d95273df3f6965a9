"""PyG's GraphSAGE on sampled batches: `python examples/pyg/sage.py cora.npz`.

Lines: 3 with Weft, 5 by hand and 15 in its loop, which takes its batches from Weft's loader: where PyG's own is
installed with its compiled libraries, `from torch_geometric.loader import NeighborLoader` is the one line that differs.
"""

import torch
from loop import compare, train
from torch_geometric.nn import GraphSAGE

import weft
from weft import NeighborLoader

MODEL = {"hidden_channels": 64, "num_layers": 2, "dropout": 0.5}
BATCHES = {"num_neighbors": [10, 10], "batch_size": 32}


def with_weft(data, seed):
    sampling = {**BATCHES, "batch_seed": seed, "seed": seed}
    task = weft.Task(data, GraphSAGE, **MODEL, **sampling, learning_rate=0.01, weight_decay=5e-4, epochs=30)
    return weft.run(task, device="cpu", progress=False).metrics["test_accuracy"]


def by_hand(data, seed):
    torch.manual_seed(seed)
    loader = NeighborLoader(data, input_nodes=data.train_mask, shuffle=True, seed=seed, **BATCHES)
    model = GraphSAGE(data.num_features, out_channels=int(data.y.max()) + 1, **MODEL)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    return train(model, data, optimizer, 30, loader)


if __name__ == "__main__":
    compare(with_weft, by_hand)
