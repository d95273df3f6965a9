"""Users' modules: those that Weft trains as a plain loop does, and those that it may refuse instead."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft


class Base(nn.Module):
    """One of Weft's layers and a dense one."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.conv, self.last = weft.nn.GCNConv(in_features, 8), nn.Linear(8, out_features)

    def hidden(self, x: Tensor, adj) -> Tensor:
        return torch.relu(self.conv(x, adj))

    def forward(self, x, adj):
        return self.last(self.hidden(x, adj))


class Dense(nn.Module):
    """Reads no edges."""

    def __init__(self, in_features, out_features, hidden=8):
        super().__init__()
        self.first, self.last = nn.Linear(in_features, hidden), nn.Linear(hidden, out_features)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


class Draws(Base):
    """Random numbers of torch in ``forward``."""

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return self.last(h + 0.1 * torch.randn_like(h) if self.training else h)


class Drops(Base):
    """Torch's dropout, for which Weft draws masks of its own."""

    def forward(self, x, adj):
        return self.last(F.dropout(self.hidden(x, adj), 0.4, self.training))


class RunningMean(Base):
    """A buffer that every training step replaces."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return self.last(h - self.mean)


class BatchNormed(Base):
    """Torch's batch norm: running mean, variance and a count."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x, adj):
        return self.last(self.norm(self.hidden(x, adj)))


class Tied(Base):
    """One parameter in two layers."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x, adj):
        return self.last(self.b(torch.relu(self.a(self.hidden(x, adj)))))


class Hooked(Base):
    """A hook halves a gradient."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.last.weight.register_hook(lambda grad: grad * 0.5)


class TwoOutputs(Base):
    """Logits, and a loss that is added to the objective."""

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return self.last(h), 0.1 * h.square().mean()


class Unused(Base):
    """Some parameters are frozen, some are never used."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.never = nn.Linear(8, 8)
        self.conv.requires_grad_(False)


class Scalar(Base):
    """A parameter without a dimension."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x, adj):
        return super().forward(x, adj) * self.scale


class Own(Base):
    """Numbers of its own that are no parameters and no buffers."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.scale = torch.rand(8).mul(3).tolist()

    def forward(self, x, adj):
        return self.last(self.hidden(x, adj) * torch.tensor(self.scale))


class PygGCN(nn.Module):
    """Two layers of PyG with batch norm."""

    def __init__(self, in_features, out_features):
        super().__init__()
        from torch_geometric.nn import GCNConv

        self.first = GCNConv(
            in_features, 8, bias=False
        )  # the norm removes a bias, so that its gradient is only rounding
        self.norm, self.second = nn.BatchNorm1d(8), GCNConv(8, out_features)

    def forward(self, x, edge_index):
        return self.second(torch.relu(self.norm(self.first(x, edge_index))), edge_index)


class PygGAT(nn.Module):
    """Attention of PyG with several heads."""

    def __init__(self, in_features, out_features):
        super().__init__()
        from torch_geometric.nn import GATConv

        self.first, self.second = GATConv(in_features, 4, heads=2), GATConv(8, out_features)

    def forward(self, x, edge_index):
        return self.second(F.elu(self.first(x, edge_index)), edge_index)


class PygSAGE(nn.Module):
    """Two layers of PyG that Weft samples batches for."""

    def __init__(self, in_features, out_features):
        super().__init__()
        from torch_geometric.nn import SAGEConv

        self.first, self.second = SAGEConv(in_features, 8), SAGEConv(8, out_features)

    def forward(self, x, edge_index):
        return self.second(torch.relu(self.first(x, edge_index)), edge_index)


class TwoBranches(nn.Module):
    """Weft's layers beside each other, for ranks."""

    def __init__(self, in_features, out_features, hidden=8):
        super().__init__()
        self.left, self.right = weft.nn.GCNConv(in_features, hidden), weft.nn.SAGEConv(in_features, hidden)
        self.out = weft.nn.GCNConv(2 * hidden, out_features)

    def forward(self, x, adj):
        both = torch.cat([self.left(x, adj), self.right(x, adj)], -1).relu()
        return self.out(F.dropout(both, 0.3, self.training), adj)


class CountsInPython(Base):
    """State in a plain attribute."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.calls = 0

    def forward(self, x, adj):
        if self.training:
            self.calls += 1
        return self.last(self.hidden(x, adj) * (1 + 0.1 * self.calls))


class KeepsActivation(Base):
    """Reads the activation of the step before."""

    kept = None

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        mixed = h if self.kept is None or not self.training else 0.5 * h + 0.5 * self.kept
        if self.training:
            self.kept = h.detach()
        return self.last(mixed)


class Clamped(Base):
    """Changes its own weights in ``forward``."""

    def forward(self, x, adj):
        with torch.no_grad():
            self.last.weight.clamp_(min=-0.1, max=0.1)
        return super().forward(x, adj)


class TiedBuffers(Base):
    """One buffer under two names."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        count = torch.zeros(1)
        self.register_buffer("count", count)
        self.last.register_buffer("same", count)

    def forward(self, x, adj):
        if self.training:
            self.count += 1
        return super().forward(x, adj) * (1 + 0.1 * self.last.same)


class Turned(Base):
    """A complex parameter."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x, adj):
        return self.last((self.hidden(x, adj) * self.turn).abs())


class ParametersInList(Base):
    """Reads its parameters from a list of its own."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.own = list(self.last.parameters())

    def forward(self, x, adj):
        return F.linear(self.hidden(x, adj), *self.own)


class StartsLate(Base):
    """Its first layer has a gradient in every second step."""

    calls = 0

    def forward(self, x, adj):
        if self.training:
            self.calls += 1
        h = self.hidden(x, adj)
        return self.last(h if self.calls % 2 else h.detach())


EXACT = (Base, Dense, Draws, RunningMean, BatchNormed, Tied, Hooked, TwoOutputs, Unused, Scalar, Own)
PYG = (PygGCN, PygGAT, PygSAGE)
EXACT_OR_REFUSED = (
    CountsInPython,
    KeepsActivation,
    Clamped,
    TiedBuffers,
    Turned,
    ParametersInList,
    StartsLate,
)
