"""Every Triton kernel, walked through by Triton's interpreter on the CPU, against float64. Faults are planted.

Run by tests/layers/test_interpreted.py in a process of its own, for the interpreter must be chosen before Triton is
first imported.
"""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from frontier.layers import ffn_triton, join_triton, scores_triton, short_triton

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
EPS = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def packed(B: int, S: int, H: int, K: int, dtype: torch.dtype = torch.float32, scale: float = 1) -> tuple[Tensor, ...]:
    qkv = torch.randn(B, S, 3, H, K, generator=torch.Generator().manual_seed(5))
    qkv[:, :, :2] *= scale
    return qkv.to(dtype).unbind(2)


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def assert_near(got: Tensor, want: Tensor, limit: float) -> None:
    worst = float((got.double() - want).abs().max())
    assert worst <= limit * max(1.0, float(want.abs().max())), f"worst difference {worst:.2g}"


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("S", [1, 63, 64, 65, 128, 150])
@pytest.mark.parametrize("attend", [short_triton.short, scores_triton.scores], ids=["short", "scores"])
def test_attention_of_any_length_equals_float64(attend: Attend, S: int, causal: bool) -> None:
    given = packed(2, S, 2, 32)
    assert_near(attend(*given, causal), exact(*given, causal), EPS[torch.float32])


# No bfloat16: Triton's interpreter multiplies its bit patterns as whole numbers, and recipes refuse it there.
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("K", [8, 24, 32, 64, 128, 256])
@pytest.mark.parametrize("attend", [short_triton.short, scores_triton.scores], ids=["short", "scores"])
def test_attention_of_any_head_width_keeps_its_precision(attend: Attend, K: int, dtype: torch.dtype) -> None:
    given = packed(1, 70, 2, K, dtype)
    got = attend(*given, True)
    assert got.dtype == dtype and got.shape == (1, 70, 2, K)
    assert_near(got, exact(*given, True), EPS[dtype])


def test_long_sequences_take_larger_tiles_and_stay_right() -> None:
    given = packed(1, 600, 1, 16, torch.float16)
    assert short_triton.tile(16, 600, 2, (9, 0))["M"] != short_triton.tile(16, 64, 2, (9, 0))["M"]
    for causal in (True, False):
        assert_near(short_triton.short(*given, causal), exact(*given, causal), EPS[torch.float16])


@pytest.mark.parametrize("capability", [(7, 5), (8, 6), (9, 0)])
def test_the_tiles_of_every_card_are_right(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    for room in (short_triton, ffn_triton):
        monkeypatch.setattr(room, "capability_of", lambda device: capability)
    given = packed(1, 70, 1, 256, torch.float16)
    assert_near(short_triton.short(*given, True), exact(*given, True), EPS[torch.float16])
    check_gelu(ffn_triton, 70, 64, 96, torch.float16)


def test_the_short_kernels_context_is_in_one_piece() -> None:
    assert short_triton.short(*packed(2, 40, 4, 8), True).is_contiguous()


def test_scores_that_half_precision_could_not_hold_do_not_overflow() -> None:
    q, k, v = packed(1, 40, 1, 64, torch.float16, scale=60)
    assert float((q.float().transpose(1, 2) @ k.float().permute(0, 2, 3, 1)).max()) > 65_504
    assert_near(short_triton.short(q, k, v, True), exact(q, k, v, True), 2 * EPS[torch.float16])
    # Materialised in half precision they are rounded to 4 near 8,000: finite, no more.
    assert bool(torch.isfinite(scores_triton.scores(q, k, v, True)).all())


def joined(x: Tensor, added: Tensor | None, gain: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x.double() if added is None else x.double() + added.double()
    return total, torch.nn.functional.layer_norm(total, gain.shape, gain.double(), bias.double(), 1e-5)


def check_join(room: Any, T: int, D: int, dtype: torch.dtype, adds: bool = True, last: bool = False) -> None:
    x, added, gain, bias = (torch.randn(*shape) for shape in ((T, D), (T, D), (D,), (D,)))
    given = added.to(dtype) if adds else None
    total, want = joined(x, given, gain, bias)
    kept = x.clone()
    h = x if last else torch.full((T, D), torch.nan, dtype=dtype)
    room.join(x, given, gain, bias, h, 1e-5)
    assert_near(h, want, 3e-6 if last else EPS[dtype] / 2)
    if not last:
        assert_near(x, total, 1e-7)
        assert adds or torch.equal(x, kept)


@pytest.mark.parametrize("last", [False, True], ids=["on", "last"])
@pytest.mark.parametrize("adds", [False, True], ids=["first", "adds"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("T", "D"), [(1, 32), (37, 32), (70, 48), (9, 1024), (2, 5000)])
def test_a_join_equals_float64(T: int, D: int, dtype: torch.dtype, adds: bool, last: bool) -> None:
    check_join(join_triton, T, D, dtype, adds, last)


def test_a_join_of_tokens_far_from_zero_keeps_its_variance() -> None:
    x = 1000 + torch.randn(4, 128)
    _, want = joined(x, None, torch.ones(128), torch.zeros(128))
    h = torch.empty(4, 128)
    join_triton.join(x, None, torch.ones(128), torch.zeros(128), h, 1e-5)
    assert_near(h, want, 1e-3)  # float32 holds 1,000 to 6e-5


def check_gelu(room: Any, T: int, D: int, F: int, dtype: torch.dtype) -> None:
    h, weight, bias = torch.randn(T, D).to(dtype), (torch.randn(F, D) * D**-0.5).to(dtype), torch.randn(F).to(dtype)
    out = torch.full((T, F), torch.nan, dtype=dtype)
    room.gelu_linear(h, weight, bias, out)
    assert_near(out, torch.nn.functional.gelu(h.double() @ weight.double().T + bias.double()), EPS[dtype] / 2)


@pytest.mark.parametrize(("T", "D", "F"), [(1, 32, 32), (70, 32, 32), (130, 128, 128), (65, 200, 72), (64, 1024, 64)])
def test_gelu_of_a_gemm_equals_float64(T: int, D: int, F: int) -> None:
    check_gelu(ffn_triton, T, D, F, torch.float16)


def check_erf(room: Any) -> None:
    """Between -3 and 0 gelu is small, its rounding to half 6e-5 at most, and the tanh form off by 4.7e-4."""
    values = torch.linspace(-3, 0, 64).half()
    out = torch.empty(64, 16, dtype=torch.float16)
    room.gelu_linear(values[:, None].expand(64, 16).contiguous(), torch.eye(16).half(), torch.zeros(16).half(), out)
    assert_near(out[:, 0], torch.nn.functional.gelu(values.double()), 1e-4)


def test_gelu_is_the_erf_form() -> None:
    check_erf(ffn_triton)


TANH = "(2 * tl.sigmoid(1.5957691 * (u_MN + 0.044715 * u_MN * u_MN * u_MN)) - 1)"
# Each a fault that a hand could make, as (module, the text as it is, the text as it would be).
FAULTS = {
    "scale": (short_triton, "K**-0.5 * LOG2_E", "K**-0.5"),
    "mask shifted by one": (
        short_triton,
        "key_N[None, :] <= query_M[:, None]",
        "key_N[None, :] <= 1 + query_M[:, None]",
    ),
    "mask forgotten": (short_triton, "visible_MN = (key_N < S)[None, :]", "visible_MN = (key_N >= 0)[None, :]"),
    "stale maximum": (short_triton, "top_M = new_M", "top_M = top_M"),
    "sums not shrunk": (short_triton, "sums_MP * shrink_M[:, None]", "sums_MP"),
    "next keys not reached": (short_triton, "k_ptr += N * stride_S", "k_ptr += 0"),
    "heads swapped": (short_triton, "(H * K) + (head % H) * K", "(H * K) + ((head + 1) % H) * K"),
    "softmax scale": (scores_triton, "alpha=K**-0.5", "alpha=1.0"),
    "softmax mask shifted": (scores_triton, "key_S[None, :] <= (row_R % S)", "key_S[None, :] <= 1 + (row_R % S)"),
    "softmax not divided": (scores_triton, "tl.where(row_R < rows, sum_R, 1.0)", "(sum_R * 0 + 1.0)"),
    "wrong eps": (join_triton, "tl.sqrt(variance_R + EPS)", "tl.sqrt(variance_R + 0.01)"),
    "residual not kept": (join_triton, "if KEEPS:", "if False:"),
    "nothing added": (join_triton, "x_RD += added_RD.to(tl.float32)", "x_RD += 0"),
    "mean of the padding": (join_triton, "tl.sum(x_RD, axis=1) / D", "tl.sum(x_RD, axis=1) / WIDE"),
    "bias forgotten": (ffn_triton, "u_MN = sums_MN +", "u_MN = sums_MN + 0 *"),
    "tanh form": (ffn_triton, "tl.erf(u_MN * 0.7071067811865476)", TANH),
    "a piece of D left out": (ffn_triton, "range(0, D, C)", "range(C, D, C)"),
}


def spoilt(folder: Path, room: Any, right: str, wrong: str, name: str = "spoilt") -> Any:
    """The module with one line as it would be."""
    source = Path(room.__file__).read_text()
    assert source.count(right) == 1, f"{source.count(right)} times `{right}`"
    path = folder / f"{name}.py"
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(module: Any, room: Any) -> None:
    """What the tests above ask of a module, in one place."""
    if room is join_triton:
        check_join(module, 37, 48, torch.float32)
    elif room is ffn_triton:
        check_gelu(module, 70, 128, 64, torch.float16)
        check_erf(module)
    else:
        attend = module.short if room is short_triton else module.scores
        for causal, K in ((True, 24), (False, 24)):
            given = packed(2, 150, 2, K)
            assert_near(attend(*given, causal), exact(*given, causal), EPS[torch.float32])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(tmp_path: Path, fault: str) -> None:
    room, right, wrong = FAULTS[fault]
    check(spoilt(tmp_path, room, "Takes ", "takes "), room)  # the copy by itself is right
    with pytest.raises(AssertionError, match="worst difference"):
        check(spoilt(tmp_path, room, right, wrong, "wrong"), room)


def far_apart(folder: Path, rows: int, stride: int, width: int, dtype: torch.dtype) -> Tensor:
    """`rows` rows of zeros, `stride` elements apart, in a file of holes: the last lies past 2^31 elements."""
    path = folder / "sparse"
    with path.open("wb") as file:
        file.truncate(((rows - 1) * stride + width) * dtype.itemsize)
    flat = torch.from_file(str(path), shared=True, size=(rows - 1) * stride + width, dtype=dtype)
    return flat.as_strided((rows, width), (stride, 1))


def check_far_join(module: Any, folder: Path) -> None:
    x = far_apart(folder, 6, (1 << 29) - 8, 32, torch.float32)  # the 5th row begins at 2^31 - 32
    x.copy_(torch.randn(6, 32))
    _, want = joined(x.clone(), None, torch.ones(32), torch.zeros(32))
    h = torch.empty(6, 32)
    module.join(x, None, torch.ones(32), torch.zeros(32), h, 1e-5)
    assert_near(h, want, 3e-6)


def test_a_join_reads_past_two_to_the_31_elements(tmp_path: Path) -> None:
    check_far_join(join_triton, tmp_path)


def test_attention_reads_past_two_to_the_31_elements(tmp_path: Path) -> None:
    S, H, K = 16, 2, 16
    rows = far_apart(tmp_path, 5, (1 << 29) + 16, S * 3 * H * K, torch.float16)
    rows.copy_(torch.randn(5, S * 3 * H * K))
    q, k, v = (rows.as_strided((5, S, H, K), (rows.stride(0), 3 * H * K, K, 1), part * H * K) for part in range(3))
    assert_near(short_triton.short(q, k, v, True), exact(q, k, v, True), EPS[torch.float16])


def test_gelu_reads_past_two_to_the_31_elements(tmp_path: Path) -> None:
    h = far_apart(tmp_path, 130, 1 << 24, 32, torch.float16)  # the 128th row begins at 2^31
    h.copy_(torch.randn(130, 32))
    weight, out = torch.randn(32, 32).half(), torch.empty(130, 32).half()
    ffn_triton.gelu_linear(h, weight, torch.zeros(32).half(), out)
    want = torch.nn.functional.gelu(h.double() @ weight.double().T)
    assert_near(out, want, EPS[torch.float16] / 2)


def test_an_offset_of_32_bits_would_be_seen(tmp_path: Path) -> None:
    """In a child: it reads where nothing is."""
    module = spoilt(tmp_path, join_triton, "tl.program_id(0).to(tl.int64)", "tl.program_id(0)")
    process = os.fork()
    if process == 0:
        try:
            check_far_join(module, tmp_path)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(process, 0)[1] != 0
