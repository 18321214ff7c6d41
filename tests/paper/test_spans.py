"""Lengths that cut a total evenly."""

import pytest

from frontier.spans import even_lengths


@pytest.mark.parametrize(
    ("total", "longest"), [(100_000, 65_536), (1 << 20, 65_536), (1 << 22, 65_536), (1_000_003, 4_096), (257, 257)]
)
def test_no_last_crumb_is_left(total: int, longest: int) -> None:
    lengths = even_lengths(total, longest, 128)
    assert lengths == sorted(set(lengths), reverse=True) and lengths[0] <= longest and lengths[-1] >= 128
    for length in lengths:
        *_, last = range(0, total, length)
        assert 2 * (total - last) > length or total // length > length // 2, (length, total - last)
    halved = [longest >> turn for turn in range(8)]
    crumbs = [length for length in halved if 0 < total % length < length / 8]
    assert crumbs or total % longest == 0 or total == longest, "what is tested would hold for halvings too"


def test_multiples_are_taken_where_they_weigh_little() -> None:
    assert even_lengths(100_000, 65_536, 128)[:4] == [50_048, 33_408, 25_088, 20_096]
    assert even_lengths(1 << 20, 65_536, 128)[0] == 65_536
    assert even_lengths(1000, 1000, 128) == [1000, 512, 384, 256, 200, 167, 143]


@pytest.mark.parametrize("total", [1, 7, 100, 128])
def test_what_is_short_stays_whole(total: int) -> None:
    assert even_lengths(total, total, 128) == [total]
