"""What follows a layer: dropout, norms, the epilogue of both and an activation, and the ending that adds the bias.

The mask of a dropout comes from a clock (seed, step). A runner drives a model by binding one ``clock [2]`` = (task
seed, step) to all of its modules; the mask is then a function of (seed, step, site, element) alone. Outside a runner
the clock is empty and every call takes a fresh one from torch's generator, so ``torch.manual_seed`` governs a user's
training loop.

Shapes: N nodes, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_unary

from weft import ops
from weft.core.errors import InputError
from weft.graph.sparse_features import SparseFeatures
from weft.nn.checks import check_choice, check_count, check_rate
from weft.nn.features import DroppedFeatures, Features
from weft.nn.initial import ONES, ZEROS, Parametrised
from weft.ops.dense.bias_act_dropout import dropout_rows
from weft.ops.launch.backend import on_gpu
from weft.ops.reduce import ONE_RANK, Reduce

NORMS = (None, "batch", "layer")


class Dropout(nn.Module):
    """``y = keep / (1 - p) * x`` while training, ``y = x`` otherwise.

    Shapes: ``x [..., N, F]`` of any size, or sparse features, of which only the stored values are dropped (a
    zero stays a zero). ``clock`` is an int64 buffer, empty until a runner drives it; ``rate`` holds ``p`` as a
    0-d float32 buffer, so that tasks that share a step may differ in it; ``site`` numbers the modules of a model that
    draw masks.
    Rows that are spread over ranks (``reduce``) have the masks that they would have on one.
    """

    reduce: Reduce = ONE_RANK
    clock: Tensor
    rate: Tensor

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = check_rate("dropout", p)
        self.site = 0
        self.register_buffer("clock", torch.empty(0, dtype=torch.int64), persistent=False)
        self.register_buffer("rate", torch.tensor(self.p, dtype=torch.float32), persistent=False)

    def _apply(self, fn, recurse=True):
        # A rate of 0.6 must not become 0.6016 when the weights turn to bfloat16.
        super()._apply(fn, recurse)
        self.rate = torch.tensor(self.p, dtype=torch.float32, device=self.rate.device)
        return self

    def draw(self, device: torch.device) -> tuple[Tensor | float, Tensor | None]:
        """``(rate, clock)`` for an operator that drops by itself; ``(0.0, None)`` if nothing is dropped."""
        if not self.training or self.p == 0.0:
            return 0.0, None
        return self.rate, self.clock if self.clock.numel() else fresh_clock(device)

    def draw_fused(self, device: torch.device) -> tuple[Tensor | float, Tensor | None]:
        """The same for an operator that counts rows from 0; if rows are spread over ranks, see :meth:`drop_after`."""
        return self.draw(device) if self.reduce.ranks == 1 else (0.0, None)

    def drop_after(self, x: Tensor, parts: int = 1) -> Tensor:
        """``x [N, F]`` of an operator that was given :meth:`draw_fused`, dropped if that did not do it."""
        if self.reduce.ranks == 1:
            return x
        rate, clock = self.draw(x.device)
        return x if clock is None else dropout_rows(x, rate, clock, self.site, self.reduce.first_row, parts)

    def forward(self, x: Features) -> Features:
        """``x`` with some elements dropped and the others scaled up."""
        rate, clock = self.draw(x.device)
        if clock is None:
            return x
        if self.reduce.ranks > 1:
            if not isinstance(x, SparseFeatures):
                return self.drop_after(x)
            return DroppedFeatures(x.matrix, dropout_rows(x.values, rate, clock, self.site, x.matrix.first_edge))
        if isinstance(x, SparseFeatures):
            return DroppedFeatures(x.matrix, ops.dropout(x.values, rate, clock, self.site))
        return ops.dropout(x, rate, clock, self.site)

    def extra_repr(self) -> str:
        """The rate."""
        return f"p={self.p:g}"


def fresh_clock(device: torch.device) -> Tensor:
    """A clock ``[2]`` from torch's own generator."""
    return torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=device)


def assign_sites(model: nn.Module) -> None:
    """Number the modules of ``model`` that draw masks, in the order of ``model.modules()``."""
    drawing = [module for module in model.modules() if isinstance(getattr(module, "clock", None), Tensor)]
    for site, module in enumerate(drawing):
        module.site = site


def next_mask(like: Tensor, p: float) -> tuple[float, Tensor, int]:
    """``(p, clock [2], site)`` of the next mask on the device of ``like``.

    A run counts the calls of dropout in one pass through a module, and draws each mask by (seed, step, number,
    element): its :class:`torch.overrides.TorchFunctionMode` answers here. Elsewhere torch's generator gives the clock.
    """
    if has_torch_function_unary(like):
        return handle_torch_function(next_mask, (like,), like, p)
    return p, fresh_clock(like.device), 0


class CallMask:
    """The dropout of a swapped attention layer for one call, in place of a :class:`Dropout`.

    PyG's attention calls ``F.dropout`` once; this requests one mask, so that all other masks keep their numbers.
    """

    def __init__(self, p: float, training: bool, like: Tensor) -> None:
        self._p, self._training, self._like = p, training, like
        self.site = 0

    def draw(self, device: object) -> tuple[float, Tensor | None]:
        """``(rate, clock)``, after which :attr:`site` is the mask's; ``(0.0, None)`` if nothing is dropped."""
        if not self._training or self._p == 0.0:
            return 0.0, None
        rate, clock, self.site = next_mask(self._like, self._p)
        return rate, clock


class Then(NamedTuple):
    """What follows a norm: ``dropout(act(x))``, in the terms of :func:`weft.ops.bias_act_dropout`."""

    act: str = "none"
    p: float | Tensor = 0.0
    clock: Tensor | None = None
    site: int = 0
    parts: int = 1

    def __call__(self, x: Tensor, b: Tensor | None = None) -> Tensor:
        """``dropout(act(x + b))`` in a separate pass."""
        return ops.bias_act_dropout(x, b, *self)


NOTHING = Then()


class BatchNorm(Parametrised):
    """``y = (x + b - mean) / sqrt(var + eps) * weight + bias``, mean and variance over the N nodes.

    Training uses the nodes' own statistics and updates the running ones (in place, so that a runner may bind
    the buffers); evaluation uses the running ones. ``x [N, F]``, ``b [F]`` the bias of the layer before.
    A runner that maps the model over many tasks sets ``stacked``: Weft's operator then avoids the copies that torch's
    would make. On a GPU that operator also trains single tasks, fused with what follows the norm.
    """

    stacked = False
    reduce: Reduce = ONE_RANK
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.features, self.eps, self.momentum = check_count("features", features), eps, momentum
        self.declare("weight", (features,), ONES)
        self.declare("bias", (features,), ZEROS)
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def reset_running_stats(self) -> None:
        """Mean 0 and variance 1, as at the start."""
        self.running_mean.zero_()
        self.running_var.fill_(1.0)

    def forward(self, x: Tensor, b: Tensor | None = None, then: Then = NOTHING) -> Tensor:
        """``x [N, F]`` (and the bias ``b [F]`` that was not added yet) to ``[N, F]``, with what follows."""
        dtype = self.running_mean.dtype
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        b = None if b is None else b.to(dtype)
        return self._train(x, weight, bias, b, then) if self.training else self._evaluate(x, weight, bias, b, then)

    def _train(self, x: Tensor, weight: Tensor, bias: Tensor, b: Tensor | None, then: Then) -> Tensor:
        # Subtracting the mean cancels b, so adding it would be two useless passes over [N, F]. It still shifts
        # the running mean, and has a gradient: zero.
        bias = bias if b is None else torch.add(bias, b, alpha=0.0)
        if self.reduce.ranks > 1:
            # Statistics over the rows of all ranks.
            rows = self.reduce.sum(x.new_tensor(float(x.shape[-2]), dtype=weight.dtype))
            x = x.to(weight.dtype)
            mean = self.reduce.sum(x.sum(-2)) / rows
            var = self.reduce.sum((x - mean).square().sum(-2)) / rows
            keep, take = 1.0 - self.momentum, self.momentum
            self.running_mean.mul_(keep).add_(mean.detach() if b is None else mean.detach() + b.detach(), alpha=take)
            self.running_var.mul_(keep).add_(var.detach() * (take * rows / (rows - 1).clamp(min=1)))
            return then((x - mean) * (var + self.eps).rsqrt() * weight + bias)
        if x.shape[-2] < 2:
            raise InputError(f"BatchNorm: x has {x.shape[-2]} nodes; training takes a variance over at least two")
        if on_gpu(x) and x.dim() == 2:
            return self._train_in_one(x, weight, bias, b, then)
        if self.stacked:  # the separate epilogue has a CPU kernel, the fused norm has none
            return then(self._train_in_one(x, weight, bias, b, NOTHING))
        mean = self.running_mean if b is None else self.running_mean - b.detach()
        out = F.batch_norm(x, mean, self.running_var, weight, bias, True, self.momentum, self.eps)
        if b is not None:
            self.running_mean.copy_(mean + b.detach())
        return then(out)

    def _train_in_one(self, x: Tensor, weight: Tensor, bias: Tensor, b: Tensor | None, then: Then) -> Tensor:
        from weft.ops.dense.batch_norm import batch_norm_act_dropout  # models without norms do without

        out, mean, var = batch_norm_act_dropout(x, weight, bias, self.eps, *then)
        rows = x.shape[-2]
        keep, take = 1.0 - self.momentum, self.momentum
        self.running_mean.mul_(keep).add_(mean if b is None else mean + b.detach(), alpha=take)
        self.running_var.mul_(keep).add_(var, alpha=take * rows / max(rows - 1, 1))
        return out

    def _evaluate(self, x: Tensor, weight: Tensor, bias: Tensor, b: Tensor | None, then: Then) -> Tensor:
        centre = self.running_mean if b is None else self.running_mean - b
        if on_gpu(x) and not torch.is_grad_enabled():
            from weft.ops.dense.batch_norm import normalise_act_dropout

            return normalise_act_dropout(x, centre, self.running_var, weight, bias, self.eps, *then)
        scale = weight * (self.running_var + self.eps).rsqrt()
        return then(torch.addcmul(bias - centre * scale, x, scale).to(x.dtype))

    def extra_repr(self) -> str:
        """The width."""
        return str(self.features)


class LayerNorm(Parametrised):
    """``y = (x + b - mean) / sqrt(var + eps) * weight + bias``, mean and variance over the features of a node.

    ``mode="graph"`` takes one mean and one deviation over all nodes and features, and adds ``eps`` to the
    deviation (PyG's default mode). ``x [N, F]``, ``b [F]`` the bias of the layer before.
    """

    reduce: Reduce = ONE_RANK

    def __init__(self, features: int, eps: float = 1e-5, mode: str = "node") -> None:
        super().__init__()
        self.features, self.eps = check_count("features", features), eps
        self.mode = check_choice("mode", mode, ("node", "graph"))
        self.declare("weight", (features,), ONES)
        self.declare("bias", (features,), ZEROS)

    def forward(self, x: Tensor, b: Tensor | None = None, then: Then = NOTHING) -> Tensor:
        """``x [N, F]`` (and the bias ``b [F]`` that was not added yet) to ``[N, F]``, with what follows."""
        if self.mode == "node" and on_gpu(x):
            from weft.ops.dense.layer_norm import WIDEST, layer_norm_act_dropout

            if self.features <= WIDEST:
                return layer_norm_act_dropout(x, b, self.weight, self.bias, self.eps, *then)
        x = x if b is None else x + b
        if self.mode == "node":
            return then(F.layer_norm(x, (self.features,), self.weight, self.bias, self.eps))
        if self.reduce.ranks > 1:
            count = self.reduce.sum(x.new_tensor(float(x.shape[-2] * x.shape[-1])))
            centred = x - self.reduce.sum(x.sum()) / count
            deviation = (self.reduce.sum(centred.square().sum()) / count).sqrt() + self.eps
        else:
            centred = x - x.mean()
            deviation = centred.square().mean().sqrt() + self.eps
        return then(torch.addcmul(self.bias, centred / deviation, self.weight))

    def extra_repr(self) -> str:
        """The width and the mode."""
        return f"{self.features}, mode={self.mode!r}"


ACTIVATIONS = ("relu", "elu", "none")


class Epilogue(nn.Module):
    """``y = dropout(act(norm(x + b)))`` for a layer's output ``x [N, F]`` and its bias ``b [F]``.

    This is one operator, and so one pass over ``[N, F]``; as modules these would be up to four. A norm is a separate
    one on a CPU, as a layer norm of over 1,024 features or over the graph, and as a batch norm in evaluation mode with
    gradients. A layer takes an epilogue as an argument and passes its bias to it: ``conv(x, adj, epilogue=epilogue)``.
    """

    def __init__(self, features: int, norm: str | None = None, activation: str = "relu", dropout: float = 0.0) -> None:
        super().__init__()
        kind = {None: None, "batch": BatchNorm, "layer": LayerNorm}[check_choice("norm", norm, NORMS)]
        self.norm = None if kind is None else kind(features)
        self.activation = check_choice("activation", activation, ACTIVATIONS)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, b: Tensor | None = None, parts: int = 1) -> Tensor:
        """``x [N, F]`` and the bias ``b [F]`` that was not added yet, to ``[N, F]``; ``parts``: heads side by side."""
        then = Then(self.activation, *self.dropout.draw_fused(x.device), self.dropout.site, parts)
        out = then(x, b) if self.norm is None else self.norm(x, b, then)
        return self.dropout.drop_after(out, parts)

    def extra_repr(self) -> str:
        """The activation."""
        return f"activation={self.activation!r}"


@dataclass(frozen=True)
class Ending:
    """``epilogue(out + add, bias)``, or plainly ``out + add + bias`` without an epilogue.

    Shapes: ``bias [O]``, ``add [N, O]`` (a residual). A layer finishes with :meth:`linear` if its last step is a
    product, which fuses everything into the product's pass, and with :meth:`apply` otherwise.
    """

    bias: Tensor | None = None
    epilogue: Epilogue | None = None
    add: Tensor | None = None

    def apply(self, out: Tensor, also: Tensor | None = None, parts: int = 1) -> Tensor:
        """``out [N, O]`` finished; ``also [N, O]`` is added to it. ``parts``: heads side by side in O."""
        add = self._sum(also)
        out = out if add is None else out + add
        if self.epilogue is None:
            return ops.bias_act_dropout(out, self.bias)
        return self.epilogue(out, self.bias, parts)

    def linear(self, x: Tensor, weight: Tensor, also: Tensor | None = None) -> Tensor:
        """``x W^T`` finished, ``x [N, I]``, ``weight [O, I]``; ``also [N, O]`` is added to it."""
        add = self._sum(also)
        if self.epilogue is None:
            return ops.linear(x, weight, self.bias, add=add)
        if self.epilogue.norm is not None:
            return self.epilogue(ops.linear(x, weight, add=add), self.bias)
        rate, clock = self.epilogue.dropout.draw_fused(x.device)
        act, site = self.epilogue.activation, self.epilogue.dropout.site
        out = ops.linear(x, weight, self.bias, add=add, act=act, p=rate, clock=clock, site=site)
        return self.epilogue.dropout.drop_after(out)

    def _sum(self, also: Tensor | None) -> Tensor | None:
        if self.add is None or also is None:
            return also if self.add is None else self.add
        return self.add + also
