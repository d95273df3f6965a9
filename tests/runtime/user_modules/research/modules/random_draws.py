"""Modules that draw in training: dropped edges, sampled nodes, negatives, mixed rows, skipped layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.runtime.user_modules.odd_modules import Base


class DropEdgeGen(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.a, self.b = nn.Linear(i, 8), nn.Linear(8, o)
        self.gen = torch.Generator().manual_seed(3)

    def forward(self, x, edge_index):
        if self.training:
            keep = torch.rand(edge_index.shape[1], generator=self.gen) > 0.3
            edge_index = edge_index[:, keep]
        h = torch.relu(self.a(x))
        h = torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])
        return self.b(h)


class DropEdgeGlobal(DropEdgeGen):
    def forward(self, x, edge_index):
        if self.training:
            edge_index = edge_index[:, torch.rand(edge_index.shape[1]) > 0.3]
        h = torch.relu(self.a(x))
        h = torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])
        return self.b(h)


class SaintNorm(nn.Module):
    """counts how often each node was seen, normalises by it"""

    def __init__(self, i, o):
        super().__init__()
        self.a, self.b = nn.Linear(i, 8), nn.Linear(8, o)
        self.register_buffer("seen", None)
        self.steps = 0

    def forward(self, x, edge_index):
        n = x.shape[0]
        if self.seen is None:
            self.seen = torch.zeros(n)
        if self.training:
            pick = torch.rand(n) < 0.7
            self.seen[pick] += 1
            self.steps += 1
        norm = (self.seen / max(self.steps, 1)).clamp(min=0.1)
        h = torch.relu(self.a(x)) / norm[:, None]
        return self.b(torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]]))


class Node2Vec(nn.Module):
    def __init__(self, i, o, n=40):
        super().__init__()
        self.emb = nn.Embedding(n, 8)
        self.mlp = nn.Sequential(nn.Linear(8 + i, 8), nn.ReLU(), nn.Linear(8, o))

    def forward(self, x, edge_index):
        e = self.emb(torch.arange(x.shape[0]))
        if self.training:
            neg = torch.randint(0, x.shape[0], (edge_index.shape[1],))
            pos = (e[edge_index[0]] * e[edge_index[1]]).sum(-1)
            ng = (e[edge_index[0]] * e[neg]).sum(-1)
            return self.mlp(torch.cat([e, x], -1)), 0.1 * (F.softplus(-pos).mean() + F.softplus(ng).mean())
        return self.mlp(torch.cat([e, x], -1))


class MixUp(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            lam = torch.distributions.Beta(2.0, 2.0).sample()
            h = lam * h + (1 - lam) * h[torch.randperm(len(h))]
        return self.last(h)


class GumbelST(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return self.last(h * F.gumbel_softmax(h, hard=True) if self.training else h)


class StochasticDepth(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.mid = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        for m in self.mid:
            if self.training and torch.rand(()) < 0.3:
                h = h + 0.0 * m(h)
            else:
                h = h + torch.relu(m(h))
        return self.last(h)
