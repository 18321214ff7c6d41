"""Seeded inputs follow the contract, however they are cut."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from frontier.case import Case
from frontier.data.generate import SeededSource, block_seed, fill_block
from frontier.spans import Span, cut

# By `printf frontier/1/SEED/ROW/BLOCK | sha256sum`, the first 16 digits: the first one has its top bit set.
GOLDEN_SEEDS = [
    ((1234, 0, 0), 0xB9C181A5F8A77635 - (1 << 63)),
    ((1234, 17, 24), 0x34DAE42E70F76B83),
    ((1234, 9999, 0), 0x36D0A456B2466AD0),
    ((0, 0, 0), 0x6D2B026AC8E09589),
]


def contract_row(case: Case, row: int) -> torch.Tensor:
    """Section 4 of the contract, word by word."""
    blocks = []
    for block in range(-(-case.seq_len // 4096)):
        digest = hashlib.sha256(f"frontier/1/{case.seed}/{row}/{block}".encode()).digest()
        generator = torch.Generator()
        generator.manual_seed(int.from_bytes(digest[:8], "big") % (1 << 63))
        positions = min(4096, case.seq_len - 4096 * block)
        blocks.append(torch.randn(positions, case.d_model, generator=generator) * case.input_scale)
    return torch.cat(blocks)


def read_in_cuts(source, case: Case, rows_per_read: int) -> torch.Tensor:
    whole = torch.full((case.batch_size, case.seq_len, case.d_model), float("nan"))
    for rows in cut(case.batch_size, rows_per_read):
        source.read(rows, whole[rows.as_slice()])
    return whole


@pytest.mark.parametrize(("place", "seed"), GOLDEN_SEEDS)
def test_the_seed_of_a_block_is_golden(place, seed):
    assert block_seed(*place) == seed
    assert all(block_seed(*other) != seed for other, _ in GOLDEN_SEEDS if other != place)


@pytest.mark.parametrize(
    ("row", "block", "shape", "first"),
    [
        (0, 0, (4096, 1024), [-0.12917098, -0.25804436, -1.6489811, 0.8853311]),
        (0, 0, (4, 2), [0.51877797, 1.9079409, 0.5334297, -0.5457668]),
        (17, 24, (4096, 1024), [-0.47735593, -0.28858867, -1.1646544, -0.07133073]),
    ],
)
def test_the_first_values_of_a_block_are_golden(make_case, row, block, shape, first):
    case = make_case(batch_size=32, seq_len=block * 4096 + shape[0], d_model=shape[1], seed=1234)
    block_SD = torch.empty(shape)
    fill_block(case, row, block, block_SD)
    # Close, not equal: PyTorch does not promise the last bit across CPU families.
    torch.testing.assert_close(block_SD.view(-1)[:4], torch.tensor(first), rtol=1e-5, atol=1e-6)
    for other in (case.override(seed=1235), case.override(input_scale=1.001)):
        fill_block(other, row, block, block_SD)
        assert not torch.allclose(block_SD.view(-1)[:4], torch.tensor(first), rtol=1e-5, atol=1e-6)


class SeedsByCut:
    """The fault that the contract rules out: one generator for each read."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def read(self, rows: Span, into_BSD: torch.Tensor) -> None:
        generator = torch.Generator().manual_seed(block_seed(self._case.seed, rows.start, 0))
        torch.randn(into_BSD.shape, generator=generator, out=into_BSD)


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("seq_len", [1, 2, 100, 4095, 4096, 4097, 9000])
def test_input_bytes_do_not_depend_on_the_cut(make_case, seq_len, threads):
    case = make_case(batch_size=7, seq_len=seq_len)
    source = SeededSource(case, threads)
    wholes = [read_in_cuts(source, case, rows) for rows in (1, 2, 3, 7)]
    source.close()
    assert all(torch.equal(wholes[0], other) for other in wholes[1:])
    assert torch.equal(wholes[0], torch.stack([contract_row(case, row) for row in range(7)]))

    faulty = SeedsByCut(case)
    assert not torch.equal(read_in_cuts(faulty, case, 1), read_in_cuts(faulty, case, 2))


def test_many_short_rows_share_tasks_and_stay_themselves(make_case):
    case = make_case(batch_size=300, seq_len=3, d_model=2)
    source = SeededSource(case, 2)
    whole = read_in_cuts(source, case, 300)
    source.close()
    assert torch.equal(whole, torch.stack([contract_row(case, row) for row in range(300)]))
    assert len({tuple(row.view(-1).tolist()) for row in whole}) == 300


def test_a_short_last_block_draws_just_what_it_needs(make_case):
    # 905 × 3 values are no multiple of 16, where torch fills the tail anew: a cut full block would differ there.
    case = make_case(seq_len=4096 + 905, d_model=3, heads=1)
    short_SD = torch.empty(905, 3)
    fill_block(case, 2, 1, short_SD)
    generator = torch.Generator().manual_seed(block_seed(case.seed, 2, 1))
    assert torch.equal(short_SD, torch.randn(905, 3, generator=generator))
    generator.manual_seed(block_seed(case.seed, 2, 1))
    assert not torch.equal(short_SD, torch.randn(4096, 3, generator=generator)[:905])


@pytest.mark.parametrize("input_scale", [0.5, 3.0, 1e-3, 1e4, 1 / 3])
def test_the_input_scale_multiplies_as_torch_does(make_case, input_scale):
    case = make_case(input_scale=input_scale)
    source = SeededSource(case, 2)
    whole = read_in_cuts(source, case, 2)
    source.close()
    assert torch.equal(whole[1], contract_row(case, 1))
    assert not torch.equal(whole[1], contract_row(case.override(input_scale=1.0), 1))


def test_drawing_starts_no_threads_but_its_own(make_case):
    def threads() -> set[str]:
        return set(
            os.listdir("/proc/self/task")
        )  # by id: a thread that has been joined may still be listed for a while

    case = make_case(batch_size=2, seq_len=4096, d_model=64, input_scale=2.0)
    into_BSD = torch.empty(2, 4096, 64)
    before = threads()
    source = SeededSource(case, 2)
    source.read(Span(0, 2), into_BSD)
    assert len(threads() - before) <= 2
    source.close()

    if torch.get_num_threads() > 1:
        before = threads()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(into_BSD.mul_, 2.0).result()
            assert len(threads() - before) > 1


@pytest.mark.parametrize(
    ("rows", "shape"),
    [(Span(2, 4), (2, 5000, 6)), (Span(0, 2), (1, 5000, 6)), (Span(1, 1), (0, 5000, 6)), (Span(0, 1), (1, 4999, 6))],
)
def test_rows_that_are_not_the_cases_are_our_own_mistake(make_case, rows, shape):
    source = SeededSource(make_case(), 1)
    with pytest.raises(AssertionError):
        source.read(rows, torch.empty(shape))
    source.read(Span(0, 1), torch.empty(1, 5000, 6))
    source.close()
