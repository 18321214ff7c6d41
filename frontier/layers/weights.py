"""A stack's weights: made from a seed or loaded from a file, then packed for a recipe.

Takes    a case and a seed, or a safetensors file.
Gives    the float32 state by the contract's names; packed views on a device.
Knows nothing of how the weights are used.

Letters  D width, F feed-forward width, O outputs, I inputs.
"""

import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from frontier.case import Case
from frontier.errors import DataError
from frontier.layers.costs import is_held
from frontier.recipe import Recipe

State = dict[str, Tensor]


class Linear(NamedTuple):
    """`h W^T + b`; in the working precision of a recipe, or float32 where it holds these GEMMs."""

    weight_OI: Tensor
    bias_O: Tensor


class Norm(NamedTuple):
    """Gain and bias of a LayerNorm; always float32."""

    weight_D: Tensor
    bias_D: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's weights on a device. `projections` is (q, k, v), or one Linear over all three."""

    norm1: Norm
    projections: tuple[Linear, ...]
    out: Linear
    norm2: Norm
    ffn_in: Linear
    ffn_out: Linear


class Stack(NamedTuple):
    """All layers' weights on a device, and the norm that ends them."""

    layers: tuple[Layer, ...]
    final_norm: Norm


def expected_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """The state-dict names and shapes of the contract, in the order in which a seed fills them."""
    D, F = case.d_model, case.ffn_dim
    shapes: dict[str, tuple[int, ...]] = {}

    def add(name: str, *weight: int) -> None:
        shapes[f"{name}.weight"] = weight
        shapes[f"{name}.bias"] = weight[:1]

    for i in range(case.layers):
        add(f"layers.{i}.norm1", D)
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            add(f"layers.{i}.attention.{part}", D, D)
        add(f"layers.{i}.norm2", D)
        add(f"layers.{i}.ffn_in", F, D)
        add(f"layers.{i}.ffn_out", D, F)
    add("final_norm", D)
    return shapes


def seeded_state(case: Case) -> State:
    """The float32 weights that the case's seed makes: PyTorch's default initialisation, on the CPU.

    Order    modules in the order of `expected_shapes`; a Linear draws its weight, then its bias; a LayerNorm
             draws nothing. The caller's random state is left as it was.
    Source   configs/CONTRACT.md, section 1.
    """
    state: State = {}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(case.seed)
        for name, shape in expected_shapes(case).items():
            module_name, _, kind = name.rpartition(".")
            if kind != "weight":
                continue
            module = nn.LayerNorm(shape[0]) if len(shape) == 1 else nn.Linear(shape[1], shape[0])
            state[f"{module_name}.weight"] = module.weight.detach()
            state[f"{module_name}.bias"] = module.bias.detach()
    return state


def load_state(path: Path, case: Case) -> State:
    """The float32 weights of a safetensors file, every name and shape checked before anything is read.

    Raises   DataError listing missing, extra and misshapen names, with the nearest matches.
    """
    from safetensors import SafetensorError, safe_open  # not where the drop-in was carried alone

    if not os.path.isfile(path):
        raise DataError(f"no weights file `{path}`", hint="give --weights a .safetensors file")
    expected = expected_shapes(case)
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            _check_names(path.name, expected, found)
            state = {name: file.get_tensor(name) for name in expected}
    except (SafetensorError, OSError) as reason:
        raise DataError(f"{path.name} is not a whole safetensors file: {reason}", hint="write it again") from None
    # Copies, always: safetensors hands out views of the mapped file, which may change or shrink under a run.
    return _as_float32(path.name, state, copy=True)


def checked_state(state: State, case: Case) -> State:
    """A caller's weights as float32 on the host, without gradients, every name and shape checked.

    Raises   DataError, as `load_state` does.
    """
    _check_names("the state", expected_shapes(case), {name: tuple(tensor.shape) for name, tensor in state.items()})
    return _as_float32("the state", state, copy=False)


def _as_float32(where: str, state: State, *, copy: bool) -> State:
    answer: State = {}
    for name, tensor in state.items():
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise DataError(f"{where}: `{name}` is {tensor.dtype}", hint="weights are floating-point")
        answer[name] = tensor.detach().to("cpu", torch.float32, copy=copy)
        if not bool(torch.isfinite(answer[name]).all()):
            raise DataError(f"{where}: `{name}` holds a NaN or infinity", hint="weights must be finite")
    return answer


def _check_names(where: str, expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> None:
    faults = []
    extra = [name for name in found if name not in expected]
    for name in expected:
        if name not in found:
            nearest = difflib.get_close_matches(name, extra, n=1, cutoff=0.6)
            faults.append(f"missing `{name}`" + (f" (nearest in the file: `{nearest[0]}`)" if nearest else ""))
        elif found[name] != expected[name]:
            faults.append(f"`{name}` is {list(found[name])}, the case needs {list(expected[name])}")
    for name in extra:
        nearest = difflib.get_close_matches(name, expected, n=1, cutoff=0.6)
        faults.append(f"unknown `{name}`" + (f" (nearest known: `{nearest[0]}`)" if nearest else ""))
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise DataError(
            f"{where} holds {len(found)} tensors, {len(faults)} do not fit: {shown}",
            hint=f"the case needs {len(expected)} tensors, named as in configs/CONTRACT.md; nothing was loaded",
        )


def working_dtype(recipe: Recipe) -> torch.dtype:
    """Of the GEMMs' and of attention's operands; TF32 is a way to multiply float32."""
    return {"fp16": torch.float16, "bf16": torch.bfloat16}.get(recipe.precision, torch.float32)


def pack(state: State, case: Case, recipe: Recipe, device: torch.device) -> Stack:
    """The state cast to the recipe's precision and packed, once, on the device. Norms and held GEMMs stay float32."""
    working = working_dtype(recipe)
    projecting = torch.float32 if is_held(recipe, "projections") else working
    feeding = torch.float32 if is_held(recipe, "ffn") else working

    def linear(dtype: torch.dtype, *names: str) -> Linear:
        weight_OI = torch.cat([state[f"{name}.weight"] for name in names])
        bias_O = torch.cat([state[f"{name}.bias"] for name in names])
        return Linear(weight_OI.to(device, dtype), bias_O.to(device, dtype))

    def norm(name: str) -> Norm:
        return Norm(state[f"{name}.weight"].to(device), state[f"{name}.bias"].to(device))

    layers = []
    for i in range(case.layers):
        names = [f"layers.{i}.attention.{part}_proj" for part in "qkv"]
        packed = recipe.projection == "packed"
        layers.append(
            Layer(
                norm1=norm(f"layers.{i}.norm1"),
                projections=(linear(projecting, *names),)
                if packed
                else tuple(linear(projecting, name) for name in names),
                out=linear(projecting, f"layers.{i}.attention.out_proj"),
                norm2=norm(f"layers.{i}.norm2"),
                ffn_in=linear(feeding, f"layers.{i}.ffn_in"),
                ffn_out=linear(feeding, f"layers.{i}.ffn_out"),
            )
        )
    return Stack(tuple(layers), norm("final_norm"))


def tensors_of(stack: Stack) -> Iterator[Tensor]:
    """Every tensor of a packed stack."""
    for layer in stack.layers:
        for part in (layer.norm1, *layer.projections, layer.out, layer.norm2, layer.ffn_in, layer.ffn_out):
            yield from part
    yield from stack.final_norm
