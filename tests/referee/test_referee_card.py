"""The path for a device, here on the CPU, is the referee's own CPU path to 1e-10, within its bound on memory."""

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from click.testing import Result
from test_referee_formula import BASE, MASKS, blocked, dense, lively_weights
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from referee import card as card_room
from referee import verdict as verdict_room
from referee.card import Card
from referee.case import Case
from referee.errors import CannotJudge
from referee.layer import Shape
from referee.verdict import choose_positions, recompute

CPU = torch.device("cpu")
SMALL = 120_000  # bytes: blocks of 32 queries and 8 keys at the width of BASE


def card_of(case: Case, most_bytes: int = SMALL, device: torch.device = CPU) -> Card:
    shape = Shape(layers=case.layers, heads=case.heads, d_model=case.d_model, ffn_dim=case.ffn_dim, causal=case.causal)
    return Card(device, shape, most_bytes)


def gap(case: Case, kept: Tensor | None = None, count: int | None = None, most_bytes: int = SMALL) -> float:
    """The largest difference between the path for a device and the path for the CPU."""
    x, weights = torch.randn(case.seq_len, case.d_model), lively_weights(case)
    kept = torch.ones(case.seq_len, dtype=torch.bool) if kept is None else kept
    wanted, card = choose_positions(count, case.seq_len), card_of(case, most_bytes)
    found = recompute(x.clone(), kept, wanted, lambda x, picked: card.run_stack(x, picked, weights))
    assert found.dtype == torch.float64
    return float((found - blocked(x.clone(), case, weights, kept, wanted, 1 << 30)).abs().max())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("most_bytes", [SMALL, 1 << 30])
@pytest.mark.parametrize("seq_len", [1, 7, 33, 129, 613])
def test_the_device_path_is_the_cpu_path_at_odd_sizes(seq_len: int, most_bytes: int, causal: bool) -> None:
    assert gap(replace(BASE, seq_len=seq_len, causal=causal, layers=3), most_bytes=most_bytes) < 1e-10


@pytest.mark.parametrize(("d_model", "heads"), [(24, 1), (24, 24), (50, 5), (256, 1)])
def test_the_device_path_is_the_cpu_path_for_any_head_width(d_model: int, heads: int) -> None:
    assert gap(replace(BASE, seq_len=77, d_model=d_model, heads=heads), most_bytes=1 << 23) < 1e-10


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("count", [None, 20])
@pytest.mark.parametrize("kept", MASKS.values(), ids=MASKS.keys())
def test_masks_and_picked_positions_are_the_cpu_paths(kept: Tensor, count: int | None, causal: bool) -> None:
    assert gap(replace(BASE, seq_len=101, causal=causal), kept, count) < 1e-10


def test_scores_too_large_for_exp_are_the_dense_formulas() -> None:
    case = replace(BASE, seq_len=90, layers=1)
    x, weights, kept = torch.randn(90, 24), lively_weights(case), torch.ones(90, dtype=torch.bool)
    for part in "qk":
        weights[f"layers.0.attention.{part}_proj.weight"] *= 60
    found = card_of(case).run_stack(x, torch.arange(90), weights)
    assert (found - dense(x, case, weights, kept)).abs().max() < 1e-10


def _sees_ahead(card: Card, wanted_Q: Tensor, positions: int) -> Tensor:
    return (wanted_Q + 2).clamp(max=positions)


def _in_float32(card: Card, host: Tensor) -> Tensor:
    return host.float()


@pytest.mark.parametrize(("part", "fault"), [("_seen", _sees_ahead), ("_bring", _in_float32)])
def test_the_comparison_sees_a_key_too_many_and_float32(
    part: str, fault: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Card, part, fault)
    assert gap(replace(BASE, seq_len=129)) > 1e-8


def test_what_is_ticked_is_what_was_counted() -> None:
    for case, count in ((BASE, None), (BASE, 20), (replace(BASE, causal=False), None)):
        card, done = card_of(case), []
        picked = choose_positions(count, 150)
        card.run_stack(torch.randn(150, case.d_model), picked, lively_weights(case), done.append)
        assert sum(done) == card.count_work(150, picked)[0]


class Held(TorchDispatchMode):
    """Counts the bytes of every tensor made while it lasts, until it is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.now_bytes, self.most_bytes, self._known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        mine = {arg.untyped_storage().data_ptr() for arg in tree_leaves((args, kwargs)) if isinstance(arg, Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in mine | self._known and storage.nbytes():
                    self._known.add(storage.data_ptr())
                    self.now_bytes += storage.nbytes()
                    self.most_bytes = max(self.most_bytes, self.now_bytes)
                    weakref.finalize(storage, self._gone, storage.data_ptr(), storage.nbytes())
        return made

    def _gone(self, pointer: int, size_bytes: int) -> None:
        self._known.discard(pointer)
        self.now_bytes -= size_bytes


@pytest.mark.parametrize("most_bytes", [SMALL, 400_000, 3_000_000])
@pytest.mark.parametrize("causal", [True, False])
def test_what_is_held_stays_within_the_bound_however_long_the_row(causal: bool, most_bytes: int) -> None:
    case, peaks = replace(BASE, layers=1, causal=causal), []
    card, weights = card_of(case, most_bytes), lively_weights(case)
    for positions in (1500, 3000):
        x, picked = torch.randn(positions, case.d_model), torch.arange(positions - 2 * card.queries, positions)
        with Held() as held:
            card.run_stack(x, picked, weights)
        on_the_host = len(picked) * (8 * case.d_model + 8) + 4 * card.queries * case.d_model  # answer, piece of x
        peaks.append(held.most_bytes)
        assert held.most_bytes - on_the_host <= card.held_bytes() <= 2.5 * held.most_bytes
    assert peaks[1] == pytest.approx(peaks[0], rel=0.1)


def test_tensors_that_are_held_would_be_seen() -> None:
    with Held() as held:
        kept = [torch.zeros(1000) for _ in range(5)]
        del kept
        torch.zeros(1000).exp()
    assert (held.most_bytes, held.now_bytes) == (20_000, 0)


def test_blocks_shrink_to_the_bound_and_no_further() -> None:
    for most_bytes in (SMALL, 10**6, 10**9):
        assert most_bytes / 4 < card_of(BASE, most_bytes).held_bytes() <= most_bytes
    case14 = replace(BASE, d_model=1024, heads=16, ffn_dim=1024, seq_len=1 << 20)
    assert (card_of(case14, 2 << 30).queries, card_of(case14, 2 << 30).keys) == (16_384, 2_048)
    with pytest.raises(CannotJudge, match=r"the smallest blocks need [\d,]+ bytes on cpu, the bound is 1,000"):
        card_of(BASE, 1000)


def test_a_device_has_a_speed_and_a_million_positions_are_estimated_without_an_array() -> None:
    card = card_of(BASE, 10**6)
    assert all(rate > 1e6 for rate in card.measure(0.02))
    pairs = (1 << 20) * ((1 << 20) + 1) / 2
    flops, exps = card_of(replace(BASE, layers=1), 1 << 30).count_work(1 << 20, torch.arange(1 << 20))
    assert 1 < exps / (BASE.heads * pairs) < 1.2
    assert 1 < flops / (4 * BASE.d_model * pairs) < 1.3


@pytest.mark.parametrize("name", ["cuda:99", "mps", "cuda:", "cuda:-1", "gpu"])
def test_a_device_that_is_not_there_is_refused(name: str, refused: Callable[..., str]) -> None:
    assert refused("--device", name).startswith(f"no device '{name}': ")


def test_a_device_whose_memory_is_taken_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB\nlong story")

    monkeypatch.setattr(Card, "_layer", full)
    with pytest.raises(CannotJudge, match=r"^cpu has no room left: tried to allocate 2\.00 GiB$") as refusal:
        card_of(BASE).run_stack(torch.randn(9, 24), torch.arange(9), lively_weights(BASE))
    assert refusal.value.hint.startswith("lower `--memory`")


def test_check_judges_on_a_device(
    check: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, run_dir: Any, refused: Callable[..., str]
) -> None:
    monkeypatch.setattr(verdict_room, "open_device", lambda name: CPU)
    seen = []
    monkeypatch.setattr(card_room.Card, "measure", lambda card: seen.append(card) or (1e9, 1e9))
    on_cpu = json.loads(check("--json", "--quiet").stdout)
    assert (on_cpu["device"], seen) == ("cpu", [])
    result = check("--json", "--device", "cuda:1", "--memory", "1MiB")
    on_device = json.loads(result.stdout)
    assert (on_device["device"], len(seen)) == ("cuda:1", 1)
    assert "on cuda:1, about" in result.stderr
    for key in ("output", "reference", "position", "channel"):
        assert on_device["total"]["worst"][key] == pytest.approx(on_cpu["total"]["worst"][key], abs=1e-10)
    assert refused("--device", "cuda", "--memory", "1KiB").startswith("the smallest blocks need ")


def test_a_row_beyond_the_hosts_memory_is_refused_on_a_device_too(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict_room, "open_device", lambda name: CPU)
    monkeypatch.setattr(Card, "host_bytes", lambda card, positions, picked: (positions * picked) << 40)
    assert refused("--device", "cuda", "--positions", "2").startswith("a row in float64 needs 81,920.00 GiB, ")
    monkeypatch.undo()
    one, two = card_of(replace(BASE, layers=1), 1 << 30), card_of(BASE, 1 << 30)
    assert (one.host_bytes(100, 7), two.host_bytes(100, 7)) == (24 * (400 + 112), 24 * (2000 + 112))
