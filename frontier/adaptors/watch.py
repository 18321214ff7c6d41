"""Whether a module is still what a program's weights were packed from, asked at every call in microseconds.

Takes    a module tree, the case that it was made for.
Gives    yes or no; before that, why a tree cannot be watched at all.
Knows nothing of programs, shapes or devices.
"""

import sys
from itertools import chain, count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from frontier.adaptors.plain import Attention, Block, PlainStack
from frontier.case import Case
from frontier.layers.weights import expected_shapes

EPS = 1e-5  # the contract's, and nn.LayerNorm's own
SETTINGS = ("eps", "heads", "causal")  # numbers beside parameters that the arithmetic depends on
_PARTS = {Block, Attention, nn.Linear, nn.LayerNorm, nn.ModuleList}
_EVERYWHERE = (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks)
_version = attrgetter("_version")
_ticks = count(1)  # two threads never draw the same


class WatchedParameter(nn.Parameter):
    """A parameter that marks uses of `.data`: PyTorch counts no edit made through it."""

    latest = 0  # the last use of any of them: one number to compare at each call
    uses: dict[int, int] = {}  # noqa: RUF012  # the last use of each by its id, as pickles would carry an attribute

    @property  # type: ignore[misc]
    def data(self) -> Tensor:  # type: ignore[override]
        self._mark()
        data: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return data

    @data.setter
    def data(self, data: Tensor) -> None:
        self._mark()
        Tensor.data.__set__(self, data)  # type: ignore[attr-defined]

    def detach(self) -> Tensor:
        """As any tensor's; but `nn.Parameter(p)` detaches p too, and takes nothing that is not of p's own class."""
        detached = Tensor.detach(self)
        if not torch.compiler.is_compiling() and sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
            return torch.Tensor._make_subclass(WatchedParameter, detached)
        return detached

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            own: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
            memo[id(self)] = nn.Parameter(own.clone(memory_format=torch.preserve_format), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def _mark(self) -> None:
        WatchedParameter.uses[id(self)] = WatchedParameter.latest = next(_ticks)


def _mark_all(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Behind each optimizer's step: fused ones write to parameters without a count."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, WatchedParameter):
                parameter._mark()


register_optimizer_step_post_hook(_mark_all)


class Watch:
    """Remembers a tree's modules, parameters and settings, and how often parameters were written to.

    Sees     load_state_dict, `.to()`, steps of optimizers, fused ones too (which PyTorch counts nowhere), other
             in-place edits, `p.data.mul_(2)`, `p.data = ...`, parameters and modules put in another's place or of
             another class, forward hooks of modules and of all modules, a `forward` or another attribute given to
             a module, `eps`, `heads` and `causal`.
    Blind    to edits of memory that PyTorch does not count: through `p.detach().numpy()`, `p.numpy()`, DLPack,
             `p.untyped_storage()`, a pointer, another process, a collective such as `dist.broadcast(p)`; through a
             `p.data` taken before an earlier call, or of another tensor that shares the parameter's memory
             (`load_state_dict(assign=True)`, `functional_call`, tied storage).
             To `torch.utils.swap_tensors` with another module's parameter that is watched too, to a change of
             `normalized_shape`, to a part whose `__dict__` or one of whose tables is replaced as a whole, to an
             attribute that takes the place of a deleted one, and to functions replaced in PyTorch's classes.
             After these call `load_state_dict(state_dict())`.
             In a function that Inductor compiled: to its own edits of weights before a call in it, which it may
             write past PyTorch's counts. Calls after the function see them.
    """

    __slots__ = (
        "_copies", "_hooks", "_latest", "_namespaces", "_order", "_ordered", "_parameters", "_settings", "_sizes",
        "_tables", "_things", "_types", "_uses", "_values", "_versions",
    )  # fmt: skip

    def __init__(self, root: nn.Module) -> None:
        modules = list(root.modules())
        self._tables: list[dict[str, Any]] = [
            table for module in modules for table in (module._modules, module._parameters) if table
        ]
        hooks = [h for module in modules[1:] for h in (module._forward_hooks, module._forward_pre_hooks)]
        self._hooks = (*hooks, *_EVERYWHERE)
        self._namespaces = list(map(vars, modules[1:]))
        self._sizes = list(map(len, self._namespaces))
        self._settings = [(vars(module), name) for module in modules for name in SETTINGS if name in vars(module)]
        self._values = [namespace[name] for namespace, name in self._settings]
        self._copies = list(map(dict, self._tables))
        self._ordered = [module._modules for module in modules if isinstance(module, nn.ModuleList)]
        self._order = list(map(list, self._ordered))  # of layers: that of a table is their order of running
        self._things = list(chain.from_iterable(map(dict.values, self._tables)))
        self._parameters = [thing for thing in self._things if isinstance(thing, Tensor)]
        for parameter in self._parameters:
            if type(parameter) is nn.Parameter:
                parameter.__class__ = WatchedParameter  # in place: optimizers and others hold this very object
        self._types = list(map(type, self._things))  # torch.utils.swap_tensors changes an object's all
        self._latest = WatchedParameter.latest
        self._uses = self._uses_now()
        self._versions = self._versions_now()

    def unchanged(self) -> bool:
        """Some 12 us for the 66 parameters of four layers; it runs while the card works."""
        return (
            (self._latest == WatchedParameter.latest or self._only_others_used())
            and self._same_things()
            and list(map(type, self._things)) == self._types
            and self._versions_now() == self._versions
            and [namespace.get(name) for namespace, name in self._settings] == self._values
            and list(map(len, self._namespaces)) == self._sizes
            and not any(self._hooks)
        )

    def _same_things(self) -> bool:
        """Whether each table holds the very objects that it held; 1 us, a third of asking of each whether it `is`."""
        try:
            # Python takes an object for equal to itself without asking it. Another in its place is asked, and a
            # tensor of more than one element (`why_unwatchable`) has no answer to that but an error.
            return self._tables == self._copies and list(map(list, self._ordered)) == self._order
        except (RuntimeError, ValueError):
            return False

    def _only_others_used(self) -> bool:
        """Whether no `.data` of this tree was used; other trees' uses are not looked at again."""
        latest = WatchedParameter.latest
        unused = self._uses_now() == self._uses
        if unused:
            self._latest = latest
        return unused

    def _uses_now(self) -> list[int | None]:
        return list(map(WatchedParameter.uses.get, map(id, self._parameters)))

    def _versions_now(self) -> list[int]:
        # Of the parameters themselves: whether a detached twin shares their count depends on how this was called
        # (inside of an operation of a compiled graph it does not). The switch makes it as fast: 5 us, not 12.
        with torch._C.DisableTorchFunctionSubclass():
            return list(map(_version, self._parameters))


def why_unwatchable(root: PlainStack, case: Case, device: torch.device) -> str | None:
    """Why the tree is not the case's stack in float32 on `device`, edited only where a `Watch` sees it; or None."""
    if any(_EVERYWHERE):
        return "all modules have a forward hook"
    if root.causal != case.causal:
        return f"causal is {root.causal}, the stack was made with {case.causal}"
    for name, module in root.named_modules():
        if name and type(module) not in _PARTS:
            return f"`{name}` is a {type(module).__name__}"
        if name and (module._forward_hooks or module._forward_pre_hooks):
            return f"`{name}` has a forward hook"
        if name and "forward" in vars(module):
            return f"`{name}` has a forward of its own"
        if getattr(module, "eps", EPS) != EPS:
            return f"`{name}` has another epsilon"
        if getattr(module, "heads", case.heads) != case.heads:
            return f"`{name}` has {module.heads} heads, the stack was made with {case.heads}"
    if list(root.layers._modules) != list(map(str, range(case.layers))):
        return "its layers do not stand in the order of their names"
    found = dict(root.named_parameters(remove_duplicate=False))
    if {name: tuple(parameter.shape) for name, parameter in found.items()} != expected_shapes(case):
        return "its parameters are not the contract's"
    for name, parameter in found.items():
        if type(parameter) not in (Tensor, nn.Parameter, WatchedParameter):
            return f"`{name}` is a {type(parameter).__name__}"
        if parameter.dtype is not torch.float32 or parameter.device != device:
            return f"`{name}` is {parameter.dtype} on {parameter.device}"
        if parameter.numel() == 1:
            return f"`{name}` has one element, and one like it could take its place unseen"
        if parameter.is_inference():
            return f"`{name}` was made in inference mode, where edits are not counted"
        if not parameter.is_contiguous():
            return f"`{name}` is not contiguous"
    return None
