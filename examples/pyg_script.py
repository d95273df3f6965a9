"""PyG with a loss of one's own, class weights, AdamW with two parameter groups, a plateau schedule and clipping."""

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


data = graph.to_pyg()
torch.manual_seed(0)
model = GCN(data.num_features, graph.num_classes)
groups = [
    {"params": model.conv1.parameters(), "weight_decay": 0.05},
    {"params": model.conv2.parameters(), "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=0.02)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=3, threshold=0.05)
history = {"loss": [], "val_loss": []}
for _ in range(50):
    model.train()
    optimizer.zero_grad()
    loss = focal(model(data.x, data.edge_index), data.y, data.train_mask.nonzero().squeeze(1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    model.eval()
    with torch.no_grad():
        val_loss = focal(model(data.x, data.edge_index), data.y, data.val_mask.nonzero().squeeze(1))
    scheduler.step(val_loss)
    history["loss"].append(loss.item())
    history["val_loss"].append(val_loss.item())
print(history["loss"][-1], history["val_loss"][-1])
