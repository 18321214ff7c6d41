"""What the profiler says of one call's launches becomes one line a kernel: summed times, counters weighed by them."""

from collections.abc import Callable
from types import ModuleType

import pytest


def said(script: ModuleType, launches: list[tuple[str, str, float, float]]) -> str:
    """As `ncu --csv` prints it: its own talk, a head, a line for each launch and counter."""
    lines = ["==PROF== Connected to process 7", '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    for number, (kernel, unit, time, share) in enumerate(launches):
        for name, metric in script.COUNTERS.items():
            value, kind = (f"{time:,}", unit) if name == "us" else (str(share), "%")
            lines.append(f'"{number}","{kernel}","{metric}","{kind}","{value}"')
    return "\n".join(lines)


def test_launches_of_a_kernel_are_summed_and_weighed(script_of: Callable[[str], ModuleType]) -> None:
    script = script_of("profile_kernels")
    launches = [("gemm<64, 128>(float*)", "us", 30.0, 10.0), ("join_kernel", "ns", 5_000.0, 7.0)]
    found = script.kernels_of(said(script, [*launches, ("gemm<64, 128>(float*)", "us", 10.0, 50.0)]))
    assert found["gemm"]["launches"] == 2 and found["gemm"]["us"] == pytest.approx(40)
    assert found["gemm"]["tensor cores"] == pytest.approx((30 * 10 + 10 * 50) / 40)
    assert found["join_kernel"]["us"] == pytest.approx(5) and found["join_kernel"]["L2"] == 7


def test_a_profiler_that_measured_nothing_gives_no_kernels(script_of: Callable[[str], ModuleType]) -> None:
    assert script_of("profile_kernels").kernels_of("==ERROR== no permission\n") == {}
