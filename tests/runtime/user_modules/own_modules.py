"""Twenty-three modules as researchers write them: unusual parameters, buffers, operators and arguments."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import weft

WIDTH = 8


class Start(nn.Module):
    """A layer of Weft's and a last one; subclasses do something in between."""

    def __init__(self, i, o):
        super().__init__()
        self.conv, self.last = weft.nn.GCNConv(i, WIDTH), nn.Linear(WIDTH, o)
        self.extra()

    def extra(self):
        pass

    def between(self, h, adj):
        return h

    def forward(self, x, adj):
        return self.last(self.between(torch.tanh(self.conv(x, adj)), adj))


class HopRecurrence(Start):
    """A GRU over hops."""

    def extra(self):
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def between(self, h, adj):
        for _ in range(2):
            h = self.cell(weft.ops.spmm(adj.mean(), h), h)
        return h


class HopAttention(Start):
    def extra(self):
        self.score = nn.Parameter(torch.zeros(3))

    def between(self, h, adj):
        hops = [h]
        for _ in range(2):
            hops.append(weft.ops.spmm(adj.mean(), hops[-1]))
        return torch.einsum("k,knd->nd", self.score.softmax(0), torch.stack(hops))


class MovingMean(Start):
    def extra(self):
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def between(self, h, adj):
        if self.training:
            self.calls += 1
            self.mean = self.mean + (h.detach().mean(0) - self.mean) / self.calls
        return h - self.mean


class SpectralNorm(Start):
    """Its power iteration changes buffers in every training call."""

    def extra(self):
        self.middle = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def between(self, h, adj):
        return self.middle(h)


class WeightNorm(Start):
    def extra(self):
        self.middle = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def between(self, h, adj):
        return torch.relu(self.middle(h))


class Orthogonal(Start):
    def extra(self):
        self.middle = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH, bias=False))

    def between(self, h, adj):
        return self.middle(h)


class NodeIds(Start):
    """An embedding per node beside the features."""

    def extra(self):
        self.places = nn.Embedding(40, WIDTH)

    def between(self, h, adj):
        return h + self.places.weight


class Temperature(Start):
    def extra(self):
        self.log_t = nn.Parameter(torch.tensor(0.0))

    def forward(self, x, adj):
        return super().forward(x, adj) / self.log_t.exp()


class Phases(Start):
    def extra(self):
        self.turn = nn.Parameter(torch.polar(torch.ones(WIDTH), torch.linspace(0, 3, WIDTH)))

    def between(self, h, adj):
        return torch.view_as_real(h * self.turn).sum(-1)


class Bilinear(Start):
    def extra(self):
        self.pair = nn.Bilinear(WIDTH, WIDTH, WIDTH)

    def between(self, h, adj):
        return self.pair(h, weft.ops.spmm(adj.mean(), h))


class Convolution(Start):
    """One-dimensional convolution over features."""

    def extra(self):
        self.filter = nn.Conv1d(1, 1, 3, padding=1)

    def between(self, h, adj):
        return torch.relu(self.filter(h[:, None])[:, 0])


class OwnScatter(nn.Module):
    """Aggregates by ``index_add`` itself."""

    def __init__(self, i, o):
        super().__init__()
        self.first, self.last = nn.Linear(i, WIDTH), nn.Linear(2 * WIDTH, o)

    def forward(self, x, edge_index):
        h = torch.relu(self.first(x))
        summed = torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]])
        return self.last(torch.cat([h, summed], 1))


class Repeated(Start):
    """Checkpointed without reentrance."""

    def extra(self):
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ELU())

    def between(self, h, adj):
        return checkpoint(self.middle, h, use_reentrant=False)


class ByName(Start):
    def extra(self):
        self.branches = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("even", "odd")})
        self.shares = nn.ParameterDict({"even": nn.Parameter(torch.ones(1)), "odd": nn.Parameter(torch.zeros(1))})

    def between(self, h, adj):
        return sum(self.shares[name] * branch(h) for name, branch in self.branches.items())


class Mixture(Start):
    """Experts mixed by a gate of their own."""

    def extra(self):
        self.experts = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 3) for _ in range(3))
        self.gate = nn.Linear(WIDTH, 3)

    def between(self, h, adj):
        gates = self.gate(h).softmax(-1)
        return torch.stack([h @ one for one in self.experts], -1).mul(gates[:, None]).sum(-1)


class Tied(nn.Module):
    """An encoder whose transpose decodes."""

    def __init__(self, i, o):
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(WIDTH, i) / 3), nn.Linear(i, o)

    def forward(self, x):
        return self.last(x - F.linear(torch.tanh(F.linear(x, self.weight)), self.weight.T))


class Rounded(torch.autograd.Function):
    """Rounds forward, and is the identity backward."""

    @staticmethod
    def forward(ctx, x):
        return torch.round(4 * x) / 4

    @staticmethod
    def backward(ctx, grad):
        return grad


class StraightThrough(Start):
    def between(self, h, adj):
        return Rounded.apply(h)


class Transformer(Start):
    """Attention of all nodes over all nodes."""

    def extra(self):
        self.attend = nn.MultiheadAttention(WIDTH, 2)

    def between(self, h, adj):
        return h + self.attend(h, h, h, need_weights=False)[0]


class Fourier(Start):
    def extra(self):
        self.filter = nn.Parameter(torch.ones(WIDTH // 2 + 1))

    def between(self, h, adj):
        return torch.fft.irfft(torch.fft.rfft(h, dim=-1) * self.filter, n=WIDTH, dim=-1)


class TopFeatures(Start):
    def extra(self):
        self.slope = nn.PReLU(WIDTH)

    def between(self, h, adj):
        kept = torch.zeros_like(h).scatter(1, h.topk(4, dim=1).indices, 1.0)
        return self.slope(h) * kept


class VirtualNode(Start):
    """A mean over all nodes goes back to all nodes; groups of features are normalised."""

    def extra(self):
        self.whole, self.norm = nn.Linear(WIDTH, WIDTH), nn.GroupNorm(2, WIDTH)

    def between(self, h, adj):
        return self.norm(h + self.whole(h.mean(0, keepdim=True)))


class ReZero(Start):
    """A residual that begins at nothing, batch norm that averages all epochs, a kept activation."""

    def extra(self):
        self.share, self.norm = nn.Parameter(torch.zeros(1)), nn.BatchNorm1d(WIDTH, momentum=None)
        self.middle = nn.Linear(WIDTH, WIDTH)

    def between(self, h, adj):
        self.kept = self.norm(self.middle(h))
        return h + self.share * torch.relu(self.kept)


class Sorted(nn.Module):
    """Takes features alone, sorts and sums them up."""

    def __init__(self, i, o):
        super().__init__()
        self.first, self.last = nn.Linear(i, WIDTH), nn.Linear(WIDTH, o)

    def forward(self, x):
        return self.last(torch.sort(torch.tanh(self.first(x)), dim=1).values.cumsum(1))


OWN = (
    *(HopRecurrence, HopAttention, MovingMean, SpectralNorm, WeightNorm, Orthogonal, NodeIds, Temperature, Phases),
    *(Bilinear, Convolution, OwnScatter, Repeated, ByName, Mixture, Tied, StraightThrough, Transformer, Fourier),
    *(TopFeatures, VirtualNode, ReZero, Sorted),
)
