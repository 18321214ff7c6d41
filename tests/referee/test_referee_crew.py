"""A crew works in order, one core to a thread, and stops at the first fault."""

import threading
import time

import pytest
import torch

from referee.crew import Crew, count_cores


def test_results_come_in_the_order_of_the_tasks() -> None:
    with Crew(4) as crew:
        assert crew.map(lambda wait: time.sleep(wait / 100) or wait, [3, 0, 2, 1]) == [3, 0, 2, 1]


def test_the_first_fault_ends_the_rest() -> None:
    done, lock = [], threading.Lock()

    def work(task: int) -> None:
        if task == 0:
            raise ValueError("task 0")
        time.sleep(0.01)
        with lock:
            done.append(task)

    with Crew(2) as crew, pytest.raises(ValueError, match="task 0"):
        crew.map(work, range(200))
    assert len(done) < 100


def test_each_thread_works_with_one_core_and_the_callers_setting_returns() -> None:
    before = torch.get_num_threads()
    with Crew(3) as crew:
        assert crew.map(lambda _: torch.get_num_threads(), range(9)) == [1] * 9
    assert torch.get_num_threads() == before
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [before]


def test_there_is_at_least_one_core_and_a_machine_has_a_speed() -> None:
    assert count_cores() >= 1
    with Crew(2) as crew:
        assert all(rate > 1e6 for rate in crew.measure(0.02))
