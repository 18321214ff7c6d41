"""Times are taken in turn, noise is what one thing differs from itself, and a drift meets all alike."""

import time
from collections.abc import Callable

import pytest
import torch

from frontier import timing
from frontier.timing import Times, noise_band, time_in_turn

CPU = torch.device("cpu")


def sleeping(log: list[str], name: str, ms: float) -> Callable[[], None]:
    def call() -> None:
        log.append(name)
        time.sleep(ms / 1e3)

    return call


def test_calls_are_timed_in_turn_and_the_order_is_turned_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MOST_CALLS", 1)
    log: list[str] = []
    times = time_in_turn({"a": sleeping(log, "a", 1), "b": sleeping(log, "b", 3)}, CPU, rounds=4)
    assert "".join(log[-8:]) == "abbaabba"
    assert 1 <= times["a"].median_ms < times["b"].median_ms and times["b"].median_ms >= 3
    assert [len(times_ms) for times_ms in times["a"].rounds_ms] == [1, 1, 1, 1]


def test_a_slow_call_is_made_once_a_round_and_a_fast_one_many_times() -> None:
    times = time_in_turn({"slow": sleeping([], "", 60), "fast": lambda: None}, CPU, rounds=2)
    assert times["slow"].as_dict()["trials"] == 2 and times["fast"].as_dict()["trials"] == 2 * timing.MOST_CALLS


def test_percentiles_are_of_single_calls() -> None:
    assert Times(((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))).as_dict() == {"p20": 2.0, "p50": 3.5, "p80": 5.0, "trials": 6}


def test_noise_is_none_where_both_are_equal_and_follows_what_sets_them_apart() -> None:
    steady = Times(tuple((2.0,) for _ in range(12)))
    assert noise_band(steady, steady) == 0
    assert noise_band(steady, Times(tuple((2.2,) for _ in range(12)))) == pytest.approx(0.1)
    restless = Times(tuple((2.0 + 0.4 * (turn % 2),) for turn in range(12)))
    still = Times(tuple((2.0 + 0.4 * ((turn + 1) % 2),) for turn in range(12)))
    assert 0.05 < noise_band(restless, still) <= 0.2
    assert noise_band(restless, still) == noise_band(restless, still)
