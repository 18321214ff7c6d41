"""Whether a module is still what a program's weights were packed from, asked at every call in a few microseconds.

Takes    a module tree.
Gives    yes or no; before that, why a tree cannot be watched at all.
Knows nothing of programs, shapes or devices.
"""

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from frontier.adaptors.plain import Attention, Block

EPS = 1e-5  # the contract's, and nn.LayerNorm's own
_PARTS = {Block, Attention, nn.Linear, nn.LayerNorm, nn.ModuleList}
_version = attrgetter("_version")


class WatchedParameter(nn.Parameter):
    """A parameter that counts uses of `.data`: PyTorch counts no edit made through it."""

    uses = 0  # of all of them: one number to compare at each call

    @property  # type: ignore[misc]
    def data(self) -> Tensor:  # type: ignore[override]
        WatchedParameter.uses += 1
        data: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return data

    @data.setter
    def data(self, data: Tensor) -> None:
        WatchedParameter.uses += 1
        Tensor.data.__set__(self, data)  # type: ignore[attr-defined]


class Watch:
    """Remembers a tree's modules and parameters, and how often these were written to.

    Sees     load_state_dict, `.to()`, optimizers and other in-place edits, `p.data.mul_(2)`, `p.data = ...`,
             parameters and modules put in another's place, forward hooks.
    Blind    to edits through a `p.data`, numpy array or the like that was taken before an earlier call.
    """

    __slots__ = ("_hooks", "_tables", "_things", "_twins", "_types", "_uses", "_versions")

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        self._tables: list[dict[str, Any]] = [
            table for module in modules for table in (module._modules, module._parameters) if table
        ]
        self._hooks = [h for module in modules[1:] for h in (module._forward_hooks, module._forward_pre_hooks)]
        self._things = tuple(_values(self._tables))
        parameters = [thing for thing in self._things if isinstance(thing, Tensor)]
        for parameter in parameters:
            if type(parameter) is nn.Parameter:
                parameter.__class__ = WatchedParameter  # in place: optimizers and others hold this very object
        self._uses = WatchedParameter.uses
        # Twins share their parameter's count, which PyTorch reads from a plain tensor several times as fast.
        self._twins = [parameter.detach() for parameter in parameters]
        self._versions = list(map(_version, self._twins))
        self._types = list(map(type, self._things))  # torch.utils.swap_tensors changes an object's all

    def unchanged(self) -> bool:
        """Some 10 us for the 66 parameters of four layers; it runs while the card works."""
        things = tuple(_values(self._tables))
        return (
            self._uses == WatchedParameter.uses
            and len(things) == len(self._things)
            and all(map(is_, things, self._things))
            and list(map(_version, self._twins)) == self._versions
            and list(map(type, things)) == self._types
            and not any(self._hooks)
        )


def why_unwatchable(root: nn.Module, expected: dict[str, tuple[int, ...]], device: torch.device) -> str | None:
    """Why the tree is not the contract's stack in float32 on `device`, edited only where a `Watch` sees it; or None."""
    for name, module in root.named_modules():
        if name and type(module) not in _PARTS:
            return f"`{name}` is a {type(module).__name__}"
        if name and (module._forward_hooks or module._forward_pre_hooks):
            return f"`{name}` has a forward hook"
        if getattr(module, "eps", EPS) != EPS:
            return f"`{name}` has another epsilon"
    found = dict(root.named_parameters(remove_duplicate=False))
    if {name: tuple(parameter.shape) for name, parameter in found.items()} != expected:
        return "its parameters are not the contract's"
    for name, parameter in found.items():
        if type(parameter) not in (Tensor, nn.Parameter, WatchedParameter):
            return f"`{name}` is a {type(parameter).__name__}"
        if parameter.dtype is not torch.float32 or parameter.device != device:
            return f"`{name}` is {parameter.dtype} on {parameter.device}"
        if parameter.is_inference():
            return f"`{name}` was made in inference mode, where edits are not counted"
        if not parameter.is_contiguous():
            return f"`{name}` is not contiguous"
    return None


def _values(tables: list[dict[str, Any]]) -> Iterable[Any]:
    return chain.from_iterable(map(dict.values, tables))
