"""Models that propagate over the graph: PPR, APPNP, label propagation, GCNII, PNA, jumping knowledge, virtual nodes."""

from __future__ import annotations

import math

import torch
from torch import nn

import weft
from tests.runtime.user_modules.odd_modules import Base


def dense(edge_index, n):
    a = torch.zeros(n, n)
    a[edge_index[1], edge_index[0]] = 1.0
    return a


class PPR(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.a, self.b = nn.Linear(i, 8), nn.Linear(8, o)
        self.ppr = None

    def forward(self, x, edge_index):
        if self.ppr is None:
            a = dense(edge_index, x.shape[0])
            d = a.sum(1).clamp(min=1)
            self.ppr = 0.1 * torch.linalg.inv(torch.eye(len(a)) - 0.9 * a / d[:, None])
        return self.ppr @ self.b(torch.relu(self.a(x)))


class APPNPIter(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.a, self.b = nn.Linear(i, 8), nn.Linear(8, o)
        self.cache = {}

    def forward(self, x, edge_index):
        key = (x.shape[0], edge_index.shape[1])
        if key not in self.cache:
            self.cache[key] = torch.sparse_coo_tensor(
                edge_index.flip(0), torch.ones(edge_index.shape[1]), (x.shape[0],) * 2
            ).coalesce()
        z = h = self.b(torch.relu(self.a(x)))
        deg = torch.sparse.sum(self.cache[key], 1).to_dense().clamp(min=1)
        for _ in range(4):
            z = 0.9 * torch.sparse.mm(self.cache[key], z) / deg[:, None] + 0.1 * h
        return z


class LabelProp(Base):
    def forward(self, x, adj):
        z = super().forward(x, adj)
        p = z.softmax(-1)
        for _ in range(3):
            p = 0.8 * weft.ops.spmm(adj, p) / 8 + 0.2 * z.softmax(-1)
        return (p + 1e-6).log()


class JKLSTM(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.c1, self.c2 = weft.nn.GCNConv(i, 8), weft.nn.GCNConv(8, 8)
        self.lstm = nn.LSTM(8, 6, bidirectional=True, batch_first=True)
        self.att = nn.Linear(12, 1)
        self.out = nn.Linear(8, o)

    def forward(self, x, adj):
        a = torch.relu(self.c1(x, adj))
        b = torch.relu(self.c2(a, adj))
        h = torch.stack([a, b], 1)
        al = self.att(self.lstm(h)[0]).softmax(1)
        return self.out((h * al).sum(1))


class GCNII(nn.Module):
    def __init__(self, i, o, L=4):
        super().__init__()
        self.inp, self.out = nn.Linear(i, 8), nn.Linear(8, o)
        self.ws = nn.ParameterList([nn.Parameter(torch.randn(8, 8) * 0.3) for _ in range(L)])

    def forward(self, x, edge_index):
        h = h0 = torch.relu(self.inp(x))
        n = x.shape[0]
        deg = torch.zeros(n).index_add(0, edge_index[1], torch.ones(edge_index.shape[1])).clamp(min=1)
        for l, w in enumerate(self.ws):
            b = math.log(0.5 / (l + 1) + 1)
            p = torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]]) / deg[:, None]
            s = 0.9 * p + 0.1 * h0
            h = torch.relu((1 - b) * s + b * s @ w)
        return self.out(h)


class PNA(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.pre, self.post = nn.Linear(i, 8), nn.Linear(8 * 3, o)
        self.register_buffer("hist", torch.zeros(64, dtype=torch.long))
        self.register_buffer("avg", torch.ones(()))

    def forward(self, x, edge_index):
        n = x.shape[0]
        deg = torch.bincount(edge_index[1], minlength=n)
        if self.training:
            self.hist += torch.bincount(deg.clamp(max=63), minlength=64)
            self.avg = (self.hist * (torch.arange(64) + 1).log()).sum() / self.hist.sum()
        h = torch.relu(self.pre(x))
        mean = torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]]) / deg.clamp(min=1)[:, None]
        mx = torch.zeros_like(h).scatter_reduce(0, edge_index[1][:, None].expand(-1, 8), h[edge_index[0]], "amax")
        amp = (deg + 1).log()[:, None] / self.avg
        return self.post(torch.cat([mean, mx, mean * amp], -1))


class VirtualNode(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.vn = nn.Parameter(torch.zeros(1, 8))
        self.up = nn.GRUCell(8, 8)

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        v = self.up(h.mean(0, keepdim=True), self.vn)
        return self.last(h + v)
