"""Work spread over threads is over when it is said to be, also when it fails."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from frontier.data import memory
from frontier.data.memory import bytes_of, copy, poisoned, spread


def test_all_items_are_done_when_spread_returns(pool):
    done = []
    spread(pool, lambda item: (time.sleep(0.001), done.append(item)), range(50))
    assert sorted(done) == list(range(50))
    spread(pool, done.append, [])
    assert len(done) == 50


def test_when_one_item_fails_none_is_still_running_and_the_rest_is_not_begun():
    running, begun = set(), []
    other_begun, failing = threading.Event(), threading.Event()

    def work(item: int) -> None:
        begun.append(item)
        running.add(item)
        if item == 0:
            other_begun.wait(5)
            running.remove(item)
            failing.set()
            raise ValueError("item 0")
        other_begun.set()
        failing.wait(5)
        time.sleep(0.05)
        running.remove(item)

    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(ValueError, match="item 0"):
            spread(pool, work, range(1000))
        assert not running and 2 <= len(begun) < 1000
        begun_then = len(begun)
        time.sleep(0.1)
        assert len(begun) == begun_then

        # The control: a plain map leaves its threads at work.
        other_begun.clear()
        failing.clear()
        with pytest.raises(ValueError, match="item 0"):
            list(pool.map(work, range(10)))
        assert running


@pytest.mark.parametrize("piece_bytes", [4, 12, 1 << 23])
def test_copies_and_fills_reach_every_element(pool, monkeypatch, piece_bytes):
    monkeypatch.setattr(memory, "PIECE_BYTES", piece_bytes)
    into = poisoned(pool, 3, 5, 7)
    assert into.dtype == torch.float32 and into.shape == (3, 5, 7) and into.isnan().all()
    source = torch.randn(3, 5, 7)
    copy(pool, into, source)
    assert torch.equal(into, source) and into.data_ptr() != source.data_ptr()
    assert bytes_of(into) == source.numpy().tobytes()
    bytes_of(into)[0] ^= 1
    assert not torch.equal(into, source)
