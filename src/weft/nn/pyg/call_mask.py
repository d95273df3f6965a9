"""CallMask: the dropout of a swapped attention layer, whose masks are numbered with those of ``F.dropout``.

A run counts the calls of dropout in one pass through a module, and draws each mask by (seed, step, number, element).
PyG's attention calls ``F.dropout`` once; a swapped layer asks for a mask once, so that all others keep their numbers.
"""

from __future__ import annotations

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from weft.nn.dropout import fresh_clock


def next_mask(like: Tensor, p: float) -> tuple[float, Tensor, int]:
    """``(p, clock [2], site)`` of the next mask on the device of ``like``.

    A :class:`torch.overrides.TorchFunctionMode` of a run answers; elsewhere torch's generator gives the clock.
    """
    if has_torch_function_unary(like):
        found: tuple[float, Tensor, int] = handle_torch_function(next_mask, (like,), like, p)
        return found
    return p, fresh_clock(like.device), 0


class CallMask:
    """What an attention layer of Weft's reads of a :class:`weft.nn.dropout.Dropout`, for one call."""

    def __init__(self, p: float, training: bool, like: Tensor) -> None:
        self._p, self._training, self._like = p, training, like
        self.site = 0

    def draw(self, device: object) -> tuple[float, Tensor | None]:
        """``(rate, clock)``, after which :attr:`site` is the mask's; ``(0.0, None)`` if nothing is dropped."""
        if not self._training or self._p == 0.0:
            return 0.0, None
        rate, clock, self.site = next_mask(self._like, self._p)
        return rate, clock
