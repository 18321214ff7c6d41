"""How calls on rows that already lie on a device are timed, and the device's own ceilings.

Takes    callables that queue work, a device.
Gives    milliseconds of single calls, taken in turn; the noise of doing so; matmul and copy rates.
Knows nothing of recipes, cases or records.
"""

import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from frontier.machine import Machine
from frontier.units import GIB

Call = Callable[[], object]

# As the benchmark script does: warm-up first, then runs of single calls between two events each, no wait and no
# flush in between, the order turned around every other round. A share of time a round bounds what slow calls
# cost: the baseline of case 6 takes 89 ms.
WARMUP_CALLS, MOST_CALLS, ROUND_SHARE_MS = 10, 50, 50.0
_RESAMPLES = 400
_GEMM_SIZE = 8192
GEMM_BYTES = 3 * 2 * _GEMM_SIZE**2  # two factors and their product, in half precision


class Times(NamedTuple):
    """Milliseconds of single calls, by round."""

    rounds_ms: tuple[tuple[float, ...], ...]

    @property
    def median_ms(self) -> float:
        return statistics.median(ms for times in self.rounds_ms for ms in times)

    def as_dict(self) -> dict[str, float]:
        """The 20th, 50th and 80th percentile, and of how many calls."""
        every = sorted(ms for times in self.rounds_ms for ms in times)
        at = {f"p{percent}": every[round(percent / 100 * (len(every) - 1))] for percent in (20, 80)}
        return {"p20": at["p20"], "p50": self.median_ms, "p80": at["p80"], "trials": len(every)}


def time_in_turn(calls: Mapping[str, Call], device: torch.device, rounds: int) -> dict[str, Times]:
    """Time each call in each round, so that a drift of clocks or of the host meets all alike.

    Units    milliseconds: on a card between two CUDA events around the call, on a CPU of its wall clock.
    """
    many = {name: _calls_a_round(call, device) for name, call in calls.items()}
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
            found[name].append(_time_run(calls[name], many[name], device))
    return {name: Times(tuple(rounds_ms)) for name, rounds_ms in found.items()}


def _calls_a_round(call: Call, device: torch.device) -> int:
    """Warm up, and see how many calls fit a round's share of time."""
    _time_run(call, 2, device)  # the first may compile
    usual_ms = statistics.median(_time_run(call, 3, device))
    fits = max(1, min(MOST_CALLS, int(ROUND_SHARE_MS / max(usual_ms, 1e-6))))
    _time_run(call, min(WARMUP_CALLS, fits), device)
    return fits


def _time_run(call: Call, times: int, device: torch.device) -> tuple[float, ...]:
    if device.type != "cuda":
        found = []
        for _ in range(times):
            began_s = time.perf_counter()
            call()
            found.append((time.perf_counter() - began_s) * 1e3)
        return tuple(found)
    with torch.cuda.device(device):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]
        torch.cuda.synchronize()
        for began, ended in events:
            began.record()
            call()
            ended.record()
        torch.cuda.synchronize()
        return tuple(began.elapsed_time(ended) for began, ended in events)


def noise_band(one: Times, again: Times) -> float:
    """How far two medians of the very same work may lie apart, as a share: 95 of 100 resamples stay within.

    Order    rounds are drawn with replacement, the same draws each time: equal times give an equal band.
    """
    dice = random.Random(1234)
    a_ms, b_ms = ([statistics.median(times) for times in of.rounds_ms] for of in (one, again))
    apart = []
    for _ in range(_RESAMPLES):
        drawn = [dice.randrange(len(a_ms)) for _ in a_ms]
        ratio = statistics.median(b_ms[i] for i in drawn) / statistics.median(a_ms[i] for i in drawn)
        apart.append(abs(ratio - 1))
    return sorted(apart)[int(0.95 * _RESAMPLES)]


def gemm_tflops(device: torch.device) -> float:
    """The card's half-precision matmul rate: 8,192 each way, median of five."""
    a, b = (torch.randn(_GEMM_SIZE, _GEMM_SIZE, device=device, dtype=torch.float16) for _ in range(2))
    out = torch.empty_like(a)
    times_ms = _time_run(lambda: torch.mm(a, b, out=out), 6, device)
    return 2 * _GEMM_SIZE**3 / statistics.median(times_ms[1:]) / 1e9


def copy_gbps(device: torch.device) -> float:
    """The card's memory rate, bytes read and bytes written counted: a copy of 1 GiB, median of five."""
    source = torch.empty(GIB, device=device, dtype=torch.uint8)
    into = torch.empty_like(source)
    times_ms = _time_run(lambda: into.copy_(source), 6, device)
    return 2 * GIB / statistics.median(times_ms[1:]) / 1e6


def float32_peak_tflops(machine: Machine) -> float | None:
    """What the card's float32 lanes could do at its highest clock, a multiply and an add at once; None if unknown.

    Source   multiprocessors and lanes of each (CUDA C++ Programming Guide, arithmetic instructions): 64 for
             compute capability 7.x and 8.0, 128 from 8.6 on; the clock from nvidia-smi.
    """
    if machine.capability is None:
        return None
    properties = torch.cuda.get_device_properties(machine.device)
    ask = ["nvidia-smi", f"--id=GPU-{properties.uuid}", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits"]
    try:
        clock_mhz = float(subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    lanes = 64 if machine.capability in ((7, 0), (7, 2), (7, 5), (8, 0)) else 128
    return properties.multi_processor_count * lanes * 2 * clock_mhz / 1e6
