"""Modules as papers have them: propagation with what is kept, teachers, banks, penalties, filters, quantisation."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

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


class LabelProp(Base):
    def forward(self, x, adj):
        z = super().forward(x, adj)
        p = z.softmax(-1)
        for _ in range(3):
            p = 0.8 * weft.ops.spmm(adj, p) / 8 + 0.2 * z.softmax(-1)
        return (p + 1e-6).log()


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


class JacobianReg(Base):
    def forward(self, x, adj):
        if not self.training:
            return super().forward(x, adj)
        h = self.hidden(x, adj).detach().requires_grad_(True)
        z = self.last(h * h)
        (g,) = torch.autograd.grad(z.sum(), h, create_graph=True)
        return super().forward(x, adj), 0.1 * g.square().mean()


class SpectralNorm(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.mid = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x, adj):
        return self.last(self.mid(self.hidden(x, adj)))


class OldSpectralNorm(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.mid = nn.utils.spectral_norm(nn.Linear(8, 8))

    def forward(self, x, adj):
        return self.last(self.mid(self.hidden(x, adj)))


class Standard(nn.Module):
    def forward(self, w):
        return (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1e-5)


class WeightStd(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        parametrize.register_parametrization(self.last, "weight", Standard())


class MixUp(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            lam = torch.distributions.Beta(2.0, 2.0).sample()
            h = lam * h + (1 - lam) * h[torch.randperm(len(h))]
        return self.last(h)


class CosTemp(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.t = 0

    def forward(self, x, adj):
        if self.training:
            self.t += 1
        T = 0.5 + 0.5 * (1 + math.cos(math.pi * min(self.t, 20) / 20))
        return super().forward(x, adj) / T


class EMATeacher(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.teacher = copy.deepcopy(self.last)
        for p in self.teacher.parameters():
            p.requires_grad = False

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            with torch.no_grad():
                for t, s in zip(self.teacher.parameters(), self.last.parameters(), strict=True):
                    t.mul_(0.9).add_(s, alpha=0.1)
            return self.last(h), 0.5 * F.mse_loss(self.last(h), self.teacher(h).detach())
        return self.teacher(h)


class MemoryBank(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("bank", torch.zeros(16, 8))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            k = int(self.ptr)
            self.bank[k : k + 4] = h[:4].detach()
            self.ptr[0] = (k + 4) % 16
        return self.last(h + 0.3 * (h @ self.bank.T).softmax(-1) @ self.bank)


class Centroids(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("cent", torch.randn(5, 8))

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        a = torch.cdist(h, self.cent).argmin(1)
        if self.training:
            with torch.no_grad():
                s = torch.zeros(5, 8).index_add(0, a, h)
                c = torch.bincount(a, minlength=5).clamp(min=1)[:, None]
                self.cent.mul_(0.9).add_(0.1 * s / c)
        return self.last(h + self.cent[a])


class STE(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        q = (h * 4).round() / 4
        return self.last(h + (q - h).detach())


class GumbelST(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return self.last(h * F.gumbel_softmax(h, hard=True) if self.training else h)


class Meta(Base):
    """MAML-like inner step"""

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        with torch.enable_grad():
            ps = dict(self.last.named_parameters())
            if not self.training:
                return self.last(h)
            inner = torch.func.functional_call(self.last, ps, (h,)).square().mean()
            g = torch.autograd.grad(inner, list(ps.values()), create_graph=True)
            ps = {k: p - 0.1 * gg for (k, p), gg in zip(ps.items(), g, strict=True)}
        return torch.func.functional_call(self.last, ps, (h,))


class OwnCall(Base):
    def __call__(self, x, adj):
        return super().__call__(x, adj) * 1.5


class RTuple(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return self.last(h), h.square().mean()


class Lazy(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.a, self.b = nn.LazyLinear(8), nn.LazyLinear(o)

    def forward(self, x, adj):
        return self.b(torch.relu(self.a(x)))


class MDict(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.heads = nn.ModuleDict({"a.b".replace(".", "_"): nn.Linear(8, o), "self": nn.Linear(8, o)})

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return sum(m(h) for m in self.heads.values())


class FFTFilter(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.filt = nn.Parameter(torch.randn(5, dtype=torch.cfloat))

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return self.last(torch.fft.irfft(torch.fft.rfft(h) * self.filt, n=8))


class DoubleInside(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj).double()
        return F.linear(h, self.last.weight.double(), self.last.bias.double()).float()


class AutocastInside(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = self.last(h)
        return z.float()


class Vmap(Base):
    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return torch.func.vmap(lambda r: self.last(r) - r.mean())(h)


class PreHook(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.last.register_forward_pre_hook(lambda m, a: (a[0] * 2,))


class PreHookCounts(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.n = 0
        self.last.register_forward_pre_hook(self.hook)

    def hook(self, m, a):
        self.n += self.training
        return (a[0] * (1 + 0.05 * self.n),)


class NoParamBranch(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.branch = nn.Sequential(nn.ReLU(), nn.Identity())

    def forward(self, x, adj):
        return self.last(self.branch(self.hidden(x, adj)))


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


class Warmup(Base):
    """adds a branch only after 3 training calls"""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.register_buffer("t", torch.zeros((), dtype=torch.long))
        self.extra = nn.Linear(8, o)

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.t += 1
        w = (self.t.float() / 10).clamp(max=1)
        return self.last(h) + w * self.extra(h)


class VQ(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.code = nn.Embedding(6, 8)

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        idx = torch.cdist(h, self.code.weight).argmin(1)
        q = self.code(idx)
        loss = F.mse_loss(q, h.detach()) + 0.25 * F.mse_loss(h, q.detach())
        return self.last(h + (q - h).detach()), loss


class HistEmb(Base):
    """GAS-like history: reads what the previous step pushed"""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.history = torch.zeros(40, 8)

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        out = 0.5 * h + 0.5 * self.history
        if self.training:
            self.history.copy_(h.detach())
        return self.last(out)


class GradReverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lam):
        ctx.lam = lam
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.lam * g, None


class DANN(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.dom = nn.Linear(8, 2)
        self.p = 0.0

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.p = min(1.0, self.p + 0.1)
            d = self.dom(GradReverse.apply(h, self.p))
            return self.last(h), 0.1 * F.cross_entropy(d, (torch.arange(len(h)) % 2))
        return self.last(h)


ALL = [
    one
    for one in dict(globals()).values()
    if isinstance(one, type) and issubclass(one, nn.Module) and one.__module__ == __name__ and one is not Standard
]
