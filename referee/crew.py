"""Threads that each work on one task with one core, so that the pool and the BLAS never compete for cores.

Takes    the number of threads, and functions over tasks.
Gives    results in the order of the tasks; how fast this machine multiplies and exponentiates in float64.
Knows nothing of what the tasks compute.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

import torch

Task = TypeVar("Task")
Result = TypeVar("Result")


def count_cores() -> int:
    """The cores this process may use: its affinity, and a container's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or the quota is "max"
        return cores


class Crew:
    """A pool of threads, to be used in a `with` statement."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def __enter__(self) -> Crew:
        # Setting one thread's count also sets what threads born later start with, hence the restoring.
        self._torch_threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self.threads, initializer=torch.set_num_threads, initargs=(1,))
        return self

    def __exit__(self, *fault: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._torch_threads)

    def map(self, work: Callable[[Task], Result], tasks: Iterable[Task]) -> list[Result]:
        """`work` of each task, in their order; the first fault ends the rest."""
        futures = [self._pool.submit(work, task) for task in tasks]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return [future.result() for future in futures]

    def measure(self, seconds: float = 0.05) -> tuple[float, float]:
        """Float64 multiply-adds (as FLOP/s) and exponentials per second, all threads together.

        Both on a tile of the size that attention uses.
        """

        def rate(_: int) -> tuple[float, float]:
            left, right = torch.rand(256, 64, dtype=torch.float64), torch.rand(64, 512, dtype=torch.float64)
            block, rates = left @ right, []
            for product in (True, False):
                begun_s, count = time.perf_counter(), 0
                while time.perf_counter() - begun_s < seconds / 2:
                    if product:
                        torch.mm(left, right, out=block)
                    else:
                        block.neg_().exp_()  # stays within 0 and 1
                    count += block.numel()
                rates.append(count / (time.perf_counter() - begun_s))
            return 2 * 64 * rates[0], rates[1]

        rates = self.map(rate, range(self.threads))
        return sum(flops for flops, _ in rates), sum(exps for _, exps in rates)
