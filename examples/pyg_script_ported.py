"""The same script, ported: a loss of one's own, class weights, two parameter groups, plateau and clipping."""

import torch
from torch_geometric.nn import GCNConv

import weft

graph = weft.load("demo")
weights = torch.tensor([1.0, 2.0, 1.0, 0.5, 1.0, 3.0, 1.0])


class GCN(torch.nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(in_features, 16), GCNConv(16, out_features)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def focal(logits, y, rows):
    log_p = logits[rows].log_softmax(-1).gather(1, y[rows][:, None]).squeeze(1)
    return -(weights[y[rows]] * (1 - log_p.exp()) ** 2 * log_p).sum() / weights[y[rows]].sum()


groups = {"conv1.*": {"weight_decay": 0.05}, "conv2.*": {"weight_decay": 0.0}}
plateau = {"factor": 0.5, "patience": 3, "threshold": 0.05}
update = {"optimizer": "adamw", "lr": 0.02, "param_groups": groups, "clip_norm": 0.5}
task = weft.Task(graph, GCN, epochs=50, objective=focal, schedule="plateau", plateau=plateau, **update)
history = weft.run(task).history
print(history["loss"][-1], history["val_loss"][-1])
