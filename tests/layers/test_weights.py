"""Seeded weights are what torch's own modules draw; a weights file loads whole or names what is wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plain import Plain, plain
from safetensors.torch import save_file

from frontier.case import Case
from frontier.errors import DataError
from frontier.layers import weights
from frontier.layers.costs import weight_bytes
from frontier.layers.weights import Stack, State, checked_state, expected_shapes, load_state, pack, seeded_state
from frontier.recipe import REFERENCE, parse_recipe

MakeCase = Callable[..., Case]
SHAPES = [{}, {"layers": 1}, {"layers": 3, "heads": 1}, {"d_model": 8, "heads": 2, "ffn_dim": 5}, {"seed": 7}]


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_seeded_weights_equal_torch_modules_made_in_contract_order(make_case: MakeCase, sizes: dict[str, int]) -> None:
    case = make_case(**sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        wanted = Plain(case).state_dict()
    state = seeded_state(case)
    assert list(state) == list(wanted) == list(expected_shapes(case))
    assert all(torch.equal(state[name], wanted[name]) and state[name].dtype == torch.float32 for name in wanted)
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == expected_shapes(case)


def test_another_seed_or_another_order_would_be_seen(make_case: MakeCase) -> None:
    case, wanted = make_case(), plain(make_case()).state_dict()
    other = seeded_state(make_case(seed=1235))
    assert not torch.equal(other["layers.0.ffn_in.weight"], wanted["layers.0.ffn_in.weight"])
    swapped = seeded_state(case)
    assert not torch.equal(swapped["layers.0.attention.k_proj.weight"], wanted["layers.0.attention.q_proj.weight"])


def test_making_weights_leaves_the_callers_random_state_alone(make_case: MakeCase) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    seeded_state(make_case())
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    assert not torch.equal(torch.get_rng_state(), before)


def test_weights_do_not_depend_on_what_was_drawn_before(make_case: MakeCase) -> None:
    first = seeded_state(make_case())
    torch.rand(1000)
    assert all(torch.equal(tensor, first[name]) for name, tensor in seeded_state(make_case()).items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_weights_file_of_any_float_type_loads_as_float32(
    make_case: MakeCase, tmp_path: Path, dtype: torch.dtype
) -> None:
    state = {name: tensor.to(dtype) for name, tensor in seeded_state(make_case()).items()}
    loaded = load_state(saved(state, tmp_path), make_case())
    assert all(torch.equal(loaded[name], state[name].float()) for name in state)
    assert {tensor.dtype for tensor in loaded.values()} == {torch.float32}


def saved(state: State, folder: Path) -> Path:
    path = folder / "w.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    return path


def refusal(path: Path, case: Case) -> DataError:
    with pytest.raises(DataError) as caught:
        load_state(path, case)
    assert caught.value.hint and caught.value.exit_code == 2
    return caught.value


def test_a_missing_tensor_is_named(make_case: MakeCase, tmp_path: Path) -> None:
    state = seeded_state(make_case())
    del state["layers.1.norm2.bias"]
    error = refusal(saved(state, tmp_path), make_case())
    assert "w.safetensors holds 33 tensors, 1 do not fit: missing `layers.1.norm2.bias`" in str(error)
    assert "34 tensors" in str(error.hint) and "nothing was loaded" in str(error.hint)


def test_an_extra_tensor_is_named(make_case: MakeCase, tmp_path: Path) -> None:
    state = {**seeded_state(make_case()), "positions": torch.zeros(3)}
    assert "1 do not fit: unknown `positions`" in str(refusal(saved(state, tmp_path), make_case()))


def test_a_misnamed_tensor_is_named_with_the_nearest_on_both_sides(make_case: MakeCase, tmp_path: Path) -> None:
    state = seeded_state(make_case())
    state["layers.0.attn.q_proj.weight"] = state.pop("layers.0.attention.q_proj.weight")
    text = str(refusal(saved(state, tmp_path), make_case()))
    assert (
        "missing `layers.0.attention.q_proj.weight` (nearest in the file: `layers.0.attn.q_proj.weight`)" in text
        and "unknown `layers.0.attn.q_proj.weight` (nearest known: `layers.0.attention.q_proj.weight`)" in text
    )


def test_a_misshapen_tensor_is_named_with_both_shapes(make_case: MakeCase, tmp_path: Path) -> None:
    state = seeded_state(make_case())
    state["layers.0.ffn_in.weight"] = state["layers.0.ffn_in.weight"].T
    text = str(refusal(saved(state, tmp_path), make_case()))
    assert "`layers.0.ffn_in.weight` is [32, 48], the case needs [48, 32]" in text


@pytest.mark.parametrize("tensors", [{}, {"blocks.0.w": torch.zeros(2)}], ids=["none", "foreign"])
def test_a_file_without_any_known_name_loads_nothing(make_case: MakeCase, tmp_path: Path, tensors: State) -> None:
    text = str(refusal(saved(tensors, tmp_path), make_case()))
    assert f"holds {len(tensors)} tensors, {34 + len(tensors)} do not fit" in text
    assert f"; and {34 + len(tensors) - 8} more" in text


def test_no_file_is_said_plainly(make_case: MakeCase, tmp_path: Path) -> None:
    assert "no weights file" in str(refusal(tmp_path / "none.safetensors", make_case()))


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1], ids=str)
def test_a_truncated_file_is_not_whole(make_case: MakeCase, tmp_path: Path, keep: float) -> None:
    path = saved(seeded_state(make_case()), tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep) if isinstance(keep, float) else keep])
    error = refusal(path, make_case())
    assert "w.safetensors is not a whole safetensors file" in str(error) and error.hint == "write it again"


def test_a_file_that_is_no_safetensors_is_refused(make_case: MakeCase, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"\x93NUMPY" + bytes(500))
    assert "is not a whole safetensors file" in str(refusal(path, make_case()))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_is_named(make_case: MakeCase, tmp_path: Path, value: float) -> None:
    state = seeded_state(make_case())
    state["final_norm.bias"][-1] = value
    assert "`final_norm.bias` holds a NaN or infinity" in str(refusal(saved(state, tmp_path), make_case()))


def test_a_float64_weight_too_large_for_float32_is_not_let_in_as_infinity(make_case: MakeCase, tmp_path: Path) -> None:
    state = {name: tensor.double() for name, tensor in seeded_state(make_case()).items()}
    state["final_norm.bias"][-1] = 1e300
    assert "`final_norm.bias`" in str(refusal(saved(state, tmp_path), make_case()))


def test_a_weight_of_whole_numbers_is_refused(make_case: MakeCase, tmp_path: Path) -> None:
    state = seeded_state(make_case())
    state["final_norm.bias"] = torch.zeros(32, dtype=torch.int32)
    assert "`final_norm.bias` is torch.int32" in str(refusal(saved(state, tmp_path), make_case()))


def held_bytes(stack: Stack) -> int:
    return sum(tensor.nbytes for tensor in weights.tensors_of(stack))


TEXTS = ["fp32/separate", "fp32/packed", "fp16/packed", "bf16/separate", "fp16/held-ffn", "bf16/held-projections"]


@pytest.mark.parametrize("text", TEXTS)
def test_packed_weights_weigh_what_the_ledger_says(make_case: MakeCase, text: str) -> None:
    case, recipe = make_case(), parse_recipe(text, REFERENCE)
    stack = pack(seeded_state(case), case, recipe, torch.device("cpu"))
    assert held_bytes(stack) == weight_bytes(case, recipe)
    assert len(stack.layers[0].projections) == (1 if recipe.projection == "packed" else 3)
    assert stack.layers[0].norm1.weight_D.dtype == torch.float32
    other = parse_recipe("fp16" if not recipe.is_half else "fp32", recipe)
    assert held_bytes(stack) != weight_bytes(case, other)


def test_loaded_weights_do_not_change_with_their_file(make_case: MakeCase, tmp_path: Path) -> None:
    case, path = make_case(), tmp_path / "w.safetensors"
    save_file(seeded_state(case), path)
    state = load_state(path, case)
    begun = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(len(begun) // 2)
        file.write(bytes(len(begun) - len(begun) // 2))
    assert all(torch.equal(tensor, state[name]) for name, tensor in seeded_state(case).items())


def test_a_callers_weights_are_checked_like_a_files(make_case: MakeCase) -> None:
    case, state = make_case(), seeded_state(make_case())
    wide = {name: tensor.double().requires_grad_() for name, tensor in state.items()}
    taken = checked_state(wide, case)
    assert all(torch.equal(taken[name], state[name]) and not taken[name].requires_grad for name in state)
    with pytest.raises(DataError, match=r"missing `final_norm\.bias`"):
        checked_state({name: tensor for name, tensor in state.items() if name != "final_norm.bias"}, case)
    with pytest.raises(DataError, match="NaN"):
        checked_state(state | {"final_norm.bias": torch.full_like(state["final_norm.bias"], torch.nan)}, case)
