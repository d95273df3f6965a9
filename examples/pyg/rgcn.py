"""PyG's RGCNConv in a module of one's own; citing and being cited are its relations: `python examples/pyg/rgcn.py
cora.npz`.

Lines: 3 with Weft, 6 by hand and 15 in its loop.
"""

import torch
from loop import compare, train
from torch.nn import functional as F
from torch_geometric.nn import RGCNConv

import weft


class RGCN(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels, num_relations):
        super().__init__()
        self.first = RGCNConv(in_channels, hidden_channels, num_relations)
        self.last = RGCNConv(hidden_channels, out_channels, num_relations)

    def forward(self, x, edge_index, edge_type):
        hidden = self.first(x, edge_index, edge_type).relu()
        return self.last(F.dropout(hidden, training=self.training), edge_index, edge_type)


def with_weft(data, seed):
    data.edge_type = (data.edge_index[0] < data.edge_index[1]).long()
    task = weft.Task(data, RGCN, hidden_channels=16, learning_rate=0.01, weight_decay=5e-4, epochs=50, seed=seed)
    return weft.run(task, device="cpu", progress=False).metrics["test_accuracy"]


def by_hand(data, seed):
    data.edge_type = (data.edge_index[0] < data.edge_index[1]).long()
    torch.manual_seed(seed)
    classes, relations = int(data.y.max()) + 1, int(data.edge_type.max()) + 1
    model = RGCN(data.num_features, 16, classes, relations)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    return train(model, data, optimizer, epochs=50)


if __name__ == "__main__":
    compare(with_weft, by_hand)
