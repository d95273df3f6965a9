"""A training loop as one writes it with torch alone, to compare Weft's with."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from weft.graph import Graph

EPOCHS = 12


class Net(nn.Module):
    """Two dense layers; ``extra``: it returns an auxiliary loss beside the logits."""

    def __init__(self, in_features, out_features, extra=False):
        super().__init__()
        self.first, self.second, self.extra = nn.Linear(in_features, 8), nn.Linear(8, out_features), extra

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        logits = self.second(hidden)
        return (logits, 0.1 * hidden.square().mean()) if self.extra else logits


def cross_entropy(logits, y, rows):
    return F.cross_entropy(logits[rows], y[rows])


def train_plainly(
    graph: Graph,
    loss=cross_entropy,
    make=lambda model: torch.optim.Adam(model.parameters(), lr=0.05),
    clip=None,
    schedule=None,
    accumulate=1,
    ema=None,
    epochs=EPOCHS,
    extra=False,
    after=None,
):
    """Training losses, validation losses and the weights that come of it, by name."""
    torch.manual_seed(0)
    net = Net(graph.num_features, graph.num_classes, extra)
    optimizer = make(net)
    step = None if schedule is None else schedule(optimizer)
    averaged = None if ema is None else AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(ema))
    losses, checked = [], []
    for epoch in range(epochs):
        net.train()
        output = net(graph.x)
        found = loss(output[0], graph.y, graph.train) + output[1] if extra else loss(output, graph.y, graph.train)
        (found / accumulate).backward()
        if (epoch + 1) % accumulate == 0:
            if clip is not None:
                clip(net.parameters())
            optimizer.step()
            optimizer.zero_grad()
            if averaged is not None:
                averaged.update_parameters(net)
        with torch.no_grad():
            output = (net if averaged is None else averaged)(graph.x)
            checked.append(loss(output[0] if extra else output, graph.y, graph.val))
        losses.append(found.item())
        if step is not None:
            step(checked[-1])
        if after is not None:
            after(epoch + 1, optimizer)
    chosen = net if averaged is None else averaged.module
    return losses, [float(one) for one in checked], {name: p.detach() for name, p in chosen.named_parameters()}
