"""Give back what a module kept, as :mod:`weft.runtime.user_modules.kept.packing` wrote it down.

What the constructor made is filled in place, since others may hold it; what calls have made is made anew.
"""

from __future__ import annotations

import ast
import collections
import copy
import random
import sys
import types
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.runtime.user_modules.kept.iterators import from_parts
from weft.runtime.user_modules.kept.packing import COMPRESSED, Packed, Tree
from weft.runtime.user_modules.kept.walking import OF_HOOKS, cells, inside

KINDS = (list, tuple, set, frozenset, dict, deque, collections.OrderedDict, collections.Counter, torch.Size)
Referred = Callable[[dict[str, Any]], Any]


class CannotUnpack(Exception):
    """Raised for what cannot be made again, with the reason."""


def unpack(
    packed: Packed,
    template: Any,
    refer: Referred,
    shared: Callable[[Tensor], bool],
    model: nn.Module,
    done: dict[str, Any],
) -> Any:
    """The value of ``packed``; ``template``: what is in its place now, ``refer``: what a reference is to.

    ``shared``: whether a tensor is in the memory of a weight, and must not be filled; ``done``: what is made already,
    for other places that refer to it.
    Classes are looked for among those of Python, of torch's layers and of the files that ``model`` comes from.
    """
    return _Unpacker(packed, refer, shared, model, done)(packed.tree, template)


class _Unpacker:
    def __init__(
        self,
        packed: Packed,
        refer: Referred,
        shared: Callable[[Tensor], bool],
        model: nn.Module,
        done: dict[str, Any],
    ) -> None:
        self._tensors, self._refer, self._shared = packed.tensors, refer, shared
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        kinds = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
        self._files = {name for name in kinds if name != "builtins"}
        self._done = done

    def __call__(self, tree: Tree, template: Any) -> Any:
        if isinstance(tree, list):  # as written before there were other containers
            return [self(one, None) for one in tree]
        if not isinstance(tree, dict):
            return tree
        if "is" not in tree:
            return {key: self(one, None) for key, one in tree.items()}
        if tree["is"] == "again":
            return self._again(tree["label"])
        if tree["is"] == "given":  # a call gives it again
            return template
        if tree["is"] in ("weight", "module"):
            return self._refer(tree)
        return self._noted(tree, getattr(self, f"_is_{tree['is']}")(tree, template))

    def _noted(self, tree: Tree, value: Any) -> Any:
        """``value``, for others that refer to it."""
        if "label" in tree:
            self._done[tree["label"]] = value
        return value

    def _again(self, label: str) -> Any:
        if label not in self._done:
            raise CannotUnpack(f"part of {label.rpartition(':')[0]!r}, which is not there now")
        return self._done[label]

    # ---- containers and objects --------------------------------------------------------------------------

    def _is_items(self, tree: Tree, template: Any) -> Any:
        kind = self._class(tree, template)
        old = list(template) if isinstance(template, (list, tuple, deque)) and type(template) is kind else []
        if issubclass(kind, (list, set, deque)):
            made = template if type(template) is kind and not tree.get("new") else _emptied(kind, template, tree)
            self._noted(tree, made)
        found = self._each(tree["items"], old)
        if issubclass(kind, (list, set, deque)):
            made.clear()
            (made.update if isinstance(made, set) else made.extend)(found)
        else:
            made = kind(*found) if hasattr(kind, "_fields") else kind(found)
        return made

    def _each(self, trees: Sequence[Tree], old: list[Any]) -> list[Any]:
        return [self(one, old[index] if index < len(old) else None) for index, one in enumerate(trees)]

    def _is_pairs(self, tree: Tree, template: Any) -> Any:
        kind = self._class(tree, template)
        made = template if type(template) is kind and not tree.get("new") else _emptied(kind, template, tree)
        self._noted(tree, made)
        old = dict(template) if isinstance(template, MutableMapping) else {}
        found = []
        for key, one in tree["pairs"]:
            name = self(key, None)
            found.append((name, self(one, old.get(name))))
        made.clear()
        for key, one in found:
            made[key] = one
        return made

    def _is_object(self, tree: Tree, template: Any) -> Any:
        kind = self._class(tree, template)
        alike = type(template) is kind
        made = template if alike and not tree.get("new") else copy.copy(template) if alike else kind.__new__(kind)
        self._noted(tree, made)
        if isinstance(made, nn.Module) and not alike:
            made.__dict__ |= {key: collections.OrderedDict() for key in OF_HOOKS}
        for key, one in tree["fields"].items():
            old = _field(template, key) if alike else None
            if isinstance(made, nn.Module) and key.endswith("_hooks"):
                self._hooks(made, key, one, old)
            else:
                _set_field(made, key, self(one, old))
        return made

    def _hooks(self, made: Any, key: str, tree: Tree, old: Any) -> None:
        """Hooks are by numbers that differ from process to process: each is given back in its turn."""
        there = list(old.values()) if isinstance(old, dict) else []
        if len(there) != len(tree["items"]):
            raise CannotUnpack(f"{key} has {len(tree['items'])} functions, and there are {len(there)} now")
        for one, function in zip(tree["items"], there, strict=True):
            self(one, function)
        made.__dict__.setdefault(key, collections.OrderedDict())

    def _is_function(self, tree: Tree, template: Any) -> Any:
        if not isinstance(template, types.FunctionType) or set(cells(template)) != set(tree["cells"]):
            raise CannotUnpack("a function that is not there now")
        self._noted(tree, template)
        holders = dict(zip(template.__code__.co_freevars, template.__closure__ or (), strict=True))
        for name, one in tree["cells"].items():
            holders[name].cell_contents = self(one, holders[name].cell_contents)
        return template

    def _is_constant(self, tree: Tree, template: Any) -> Any:
        if template is None:
            raise CannotUnpack(f"{tree['of']}, which is not there now")
        self._noted(tree, template)
        for one, old in zip(tree.get("parts", ()), inside(template), strict=False):
            if self(one, old) is not old and isinstance(one, dict):
                raise CannotUnpack(f"{tree['of']}, which holds something else now")
        return template

    def _is_iterator(self, tree: Tree, template: Any) -> Any:
        return from_parts(tree["maker"], self(tree["parts"], None), self(tree["state"], None))

    def _is_optimizer(self, tree: Tree, template: Any) -> Any:
        if not isinstance(template, torch.optim.Optimizer):
            raise CannotUnpack("an optimizer that is not there now")
        template.load_state_dict(self(tree["state"], None))
        return template

    def _is_other(self, tree: Tree, template: Any) -> Any:
        raise CannotUnpack(f"a {tree['class']}")

    # ---- numbers -----------------------------------------------------------------------------------------

    def _is_tensor(self, tree: Tree, template: Any) -> Any:
        return self._as_it_was(tree, template, self._tensors[tree["at"]].detach().clone())

    def _is_sparse(self, tree: Tree, template: Any) -> Any:
        parts, size = [self._tensors[at].clone() for at in tree["parts"]], tree["size"]
        layout = getattr(torch, tree["layout"].removeprefix("torch."))
        if layout in COMPRESSED:
            made = torch.sparse_compressed_tensor(*parts, size, layout=layout, check_invariants=False)
        else:
            made = torch.sparse_coo_tensor(*parts, size, is_coalesced=tree["coalesced"], check_invariants=False)
        return self._as_it_was(tree, None, made)

    def _as_it_was(self, tree: Tree, template: Any, value: Tensor) -> Any:
        value = value.to(torch.device("cpu") if tree.get("host") else self._device)
        alike = isinstance(template, Tensor) and template.shape == value.shape and template.dtype == value.dtype
        in_place = alike and not tree.get("new") and template.layout is value.layout is torch.strided
        if in_place and not self._shared(template):
            template.data.copy_(value)
            value = template
        elif tree["parameter"]:
            value = nn.Parameter(value, requires_grad=tree["grad"])
        return self._in_memory(tree["memory"], value, value is template) if "memory" in tree else value

    def _in_memory(self, memory: Tree, value: Tensor, is_there: bool) -> Tensor:
        """``value`` in its part of the memory that it shares with others."""
        label = f"memory of {memory['label']}"
        if is_there:
            whole = torch.empty(0, dtype=value.dtype, device=value.device)
            self._done.setdefault(label, whole.set_(value.untyped_storage()))
            return value
        if label not in self._done:
            self._done[label] = torch.zeros(memory["numbers"], dtype=value.dtype, device=value.device)
        shape, stride, start = memory["view"]
        whole = self._done[label]
        if isinstance(value, nn.Parameter) or whole.numel() != memory["numbers"] or whole.device != value.device:
            return value
        return whole.as_strided(shape, stride, start).copy_(value)

    def _is_array(self, tree: Tree, template: Any) -> Any:
        value = self._tensors[tree["at"]].cpu().numpy().copy().astype(tree["dtype"])
        if tree["scalar"]:
            value = value[()]
        elif not tree.get("new") and isinstance(template, np.ndarray) and template.shape == value.shape:
            template[...] = value
            value = template
        return value

    def _is_generator(self, tree: Tree, template: Any) -> Any:
        state = None if "at" in tree else _as_state(tree["state"])
        made = template
        if isinstance(made, torch.Generator) and state is None:
            made.set_state(self._tensors[tree["at"]].cpu())
        elif isinstance(made, np.random.Generator):
            made.bit_generator.state = state
        elif isinstance(made, np.random.RandomState):
            made.set_state(tuple(state))
        elif isinstance(made, random.Random):
            made.setstate((state[0], tuple(state[1]), state[2]))
        else:
            raise CannotUnpack("a generator that is not there now")
        return made

    # ---- texts -------------------------------------------------------------------------------------------

    def _is_literal(self, tree: Tree, template: Any) -> Any:
        return ast.literal_eval(tree["text"])

    def _is_dtype(self, tree: Tree, template: Any) -> Any:
        return getattr(torch, tree["text"])

    def _is_device(self, tree: Tree, template: Any) -> Any:
        return torch.device(tree["text"])

    def _is_range(self, tree: Tree, template: Any) -> Any:
        return range(*tree["parts"])

    def _is_slice(self, tree: Tree, template: Any) -> Any:
        return slice(*tree["parts"])

    def _is_enum(self, tree: Tree, template: Any) -> Any:
        return self._class(tree, template)[tree["name"]]

    def _class(self, tree: Tree, template: Any) -> Any:
        """The class of a value: the template's, Python's containers, or one of the files that the model is from."""
        module, name = tree["class"]
        if [type(template).__module__, type(template).__qualname__] == tree["class"]:
            return type(template)
        for kind in KINDS:
            if [kind.__module__, kind.__qualname__] == tree["class"]:
                return kind
        found: Any = sys.modules.get(module) if module in self._files or module.startswith("torch.nn.") else None
        for part in name.split("."):
            found = getattr(found, part, None)
        if not isinstance(found, type):
            raise CannotUnpack(f"a {name} of {module}")
        return found


def _emptied(kind: Any, template: Any, tree: Tree) -> Any:
    """A new container like the template."""
    if issubclass(kind, deque):
        return kind(maxlen=tree.get("maxlen"))
    if issubclass(kind, collections.defaultdict):
        if not isinstance(template, kind):
            raise CannotUnpack("a defaultdict that is not there now")
        return kind(template.default_factory)
    return kind()


def _field(value: Any, key: str) -> Any:
    own = getattr(value, "__dict__", {})
    return own[key] if key in own else getattr(value, key, None)


def _set_field(value: Any, key: str, field: Any) -> None:
    """Set an attribute without asking the class, which may forbid it (a frozen dataclass) or do more."""
    if hasattr(value, "__dict__") and not isinstance(getattr(type(value), key, None), types.MemberDescriptorType):
        value.__dict__[key] = field
    else:
        object.__setattr__(value, key, field)


def _as_state(state: Any) -> Any:
    """The inverse of how the state of a generator is written."""
    if isinstance(state, dict) and state.keys() == {"array", "dtype"}:
        return np.array(state["array"], dtype=state["dtype"])
    if isinstance(state, dict):
        return {key: _as_state(one) for key, one in state.items()}
    return [_as_state(one) for one in state] if isinstance(state, list) else state
