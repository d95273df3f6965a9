"""WeightWrites: notice that a user's module changes its own weights in a step, whether or not a number differs.

A constraint such as ``weight.clamp_(-5, 5)`` or ``max_norm`` may change nothing at the first call and much at the
thousandth, and so may a hook in the backward pass. Only a module that owns its parameters keeps such a change; a stack
and cast weights are copies. Autograd's threads have the modes of the thread that calls it, so hooks on a GPU are seen.
"""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.nn.pyg.edges import is_bypass
from weft.runtime.user_modules.input_writes import one_memory, same_numbers

DATA = (Tensor.data.__get__, Tensor.data.__set__)
GRADIENT = Tensor.grad.__get__


class WeightWrites(TorchFunctionMode):
    """Around a call or a backward pass, :attr:`seen` becomes true if it writes to a weight or touches its ``.data``.

    Memory that is reached otherwise, as by NumPy, may only be read: it is copied first, and compared.
    :attr:`reads_gradient`: whether it looks at the ``.grad`` of a weight.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.seen = self.reads_gradient = False
        self._tables = [module._parameters for module in model.modules()]
        self._before: list[tuple[Tensor, int]] = []
        self._copies: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> Self:
        """Start watching the weights that the model has now."""
        weights = [tensor for table in self._tables for tensor in table.values() if tensor is not None]
        self._before = [(tensor, tensor._version) for tensor in weights]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop watching."""
        super().__exit__(*error)
        self.seen = self.seen or any(tensor._version != version for tensor, version in self._before)
        self.seen = self.seen or any(not same_numbers(tensor, before) for tensor, before in self._copies)
        self._before, self._copies = [], []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_bypass(func):
            reached = [tensor for tensor, _ in self._before if one_memory(args[0], tensor)]
            self.seen = self.seen or (func in DATA and bool(reached))
            self._copies += [(tensor.detach(), tensor.detach().clone()) for tensor in reached]
        elif func == GRADIENT:
            self.reads_gradient = self.reads_gradient or any(args[0] is tensor for tensor, _ in self._before)
        return func(*args, **(kwargs or {}))
