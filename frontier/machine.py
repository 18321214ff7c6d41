"""The card and the host as seen now, and the budgets we allow ourselves; the only place that asks.

Takes    which device, and budgets from flags.
Gives    a `Machine`: plain numbers, so that a plan can be made and tested for any machine.
Knows nothing of cases or recipes.
"""

import os
import platform
import resource
import subprocess
from dataclasses import dataclass
from pathlib import Path

from frontier.errors import Unsupported
from frontier.units import GIB, show_bytes

# What the CUDA context, its kernels and libraries hold on the card outside the allocator: 0.51 GiB before the
# first allocation and 0.68 GiB once cuBLAS, cuDNN and FA4 are loaded (H200, torch 2.11, cudaMemGetInfo).
CONTEXT_BYTES = int(0.75 * GIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One device and its host, in plain numbers.

    Units    bytes; budgets are what a plan may hold, never more than it is told.
    """

    device: str
    name: str
    capability: tuple[int, int] | None = None
    driver: str | None = None
    power_limit_w: float | None = None
    device_total_bytes: int = 0
    device_free_bytes: int = 0
    host_total_bytes: int
    host_available_bytes: int
    cores: int
    device_budget_bytes: int
    pinned_budget_bytes: int
    host_budget_bytes: int

    @property
    def has_card(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def capability_text(self) -> str:
        return ".".join(map(str, self.capability)) if self.capability else "none"

    def limit_allocator(self) -> None:
        """Make PyTorch's allocator refuse what the device budget does not hold, so that the budget is real."""
        if self.has_card:
            import torch

            room_bytes = max(0, self.device_budget_bytes - CONTEXT_BYTES)
            fraction = min(1.0, room_bytes / self.device_total_bytes)
            torch.cuda.set_per_process_memory_fraction(fraction, self.device)

    @classmethod
    def detect(
        cls,
        device: str = "auto",
        *,
        device_budget_bytes: int | None = None,
        pinned_budget_bytes: int | None = None,
        host_budget_bytes: int | None = None,
    ) -> "Machine":
        """Ask the card and the host what they are.

        A budget that is given is believed; one that is not is what is free now: on the card all of it,
        on the host nine tenths, of which half may be pinned.

        Raises   Unsupported if a card is asked for and there is none, or a budget exceeds what holds it.
        """
        available_bytes = host_available_bytes()
        host_budget = host_budget_bytes or int(0.9 * available_bytes)
        pinned_budget = pinned_budget_bytes or host_budget // 2
        if pinned_budget > host_budget:
            raise Unsupported(
                f"a pinned budget of {show_bytes(pinned_budget)} exceeds the host budget of {show_bytes(host_budget)}",
                hint="pinned memory is host memory: lower --pinned-budget or raise --host-budget",
            )
        limits = [limit for limit, _ in _cgroup_memory(Path("/proc"), Path("/sys/fs/cgroup"))]
        host_total_bytes = min([_host_memory_bytes()[0], *limits])
        cores = _count_cores()
        index = _card_index(device)
        if index is None:
            return cls(
                device="cpu",
                name=_cpu_name(),
                host_total_bytes=host_total_bytes,
                host_available_bytes=available_bytes,
                cores=cores,
                device_budget_bytes=min(device_budget_bytes or host_budget, host_budget),
                pinned_budget_bytes=pinned_budget,
                host_budget_bytes=host_budget,
            )
        import torch

        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        if device_budget_bytes is not None and device_budget_bytes > total_bytes:
            raise Unsupported(
                f"a device budget of {show_bytes(device_budget_bytes)} exceeds the card's {show_bytes(total_bytes)}",
                hint="lower --device-budget, or leave it out to use what is free",
            )
        properties = torch.cuda.get_device_properties(index)
        driver, power_limit_w = _ask_driver(index)
        return cls(
            device=f"cuda:{index}",
            name=properties.name,
            capability=(properties.major, properties.minor),
            driver=driver,
            power_limit_w=power_limit_w,
            device_total_bytes=total_bytes,
            device_free_bytes=free_bytes,
            host_total_bytes=host_total_bytes,
            host_available_bytes=available_bytes,
            cores=cores,
            # The context exists by now, so what is free is free for the allocator: the plan counts both.
            device_budget_bytes=device_budget_bytes or free_bytes + CONTEXT_BYTES,
            pinned_budget_bytes=pinned_budget,
            host_budget_bytes=host_budget,
        )


def host_peak_bytes(proc: Path = Path("/proc")) -> int:
    """The most memory this process held, in bytes, since it became this program.

    Source   VmHWM of /proc/self/status. `getrusage` also counts what a large parent had when it started us: a run
             out of a test suite seemed to hold 1.2 GiB instead of 0.3. It serves where there is no /proc.
    """
    try:
        for line in (proc / "self" / "status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def host_available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Host memory this process may still take: what the kernel calls available, within every cgroup limit.

    Page cache is reclaimable and does not count as used.
    """
    room = [limit - used for limit, used in _cgroup_memory(proc, cgroup)]
    return max(0, min([_host_memory_bytes()[1], *room]))


def _host_memory_bytes() -> tuple[int, int]:
    """(total, available) of the host; where the drop-in was carried alone, without psutil, what is free."""
    try:
        import psutil
    except ImportError:
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        return page_bytes * os.sysconf("SC_PHYS_PAGES"), page_bytes * os.sysconf("SC_AVPHYS_PAGES")
    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)


def _cgroup_memory(proc: Path, cgroup: Path) -> list[tuple[int, int]]:
    """(limit, used without page cache) of this process's cgroups, innermost first; v2 and v1."""
    found: list[tuple[int, int]] = []
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = cgroup, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = cgroup / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            level = _read_memory_level(place, *names)
            if level is not None:
                found.append(level)
            if place == base:
                break
    return found


def _read_memory_level(place: Path, limit_file: str, used_file: str, cache_key: str) -> tuple[int, int] | None:
    try:
        limit_text = (place / limit_file).read_text().strip()
        used_bytes = int((place / used_file).read_text())
        stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    # v1 writes "no limit" as a number near 2^63.
    if limit_text == "max" or int(limit_text) >= 1 << 60:
        return None
    return int(limit_text), used_bytes - int(stat.get(cache_key, 0))


def _count_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may keep busy: its affinity, within a container's quota of CPU time (cgroup v2)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota_us, period_us = (cgroup / "cpu.max").read_text().split()
        return max(1, min(cores, -(-int(quota_us) // int(period_us))))
    except (OSError, ValueError):  # no such file, or the quota is "max"
        return cores


def _card_index(device: str) -> int | None:
    """The index of the CUDA card that `auto`, `cpu`, `cuda` or `cuda:i` means; None for the CPU."""
    kind, _, index_text = device.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index_text and not index_text.isdigit()):
        raise Unsupported(f"no device `{device}`", hint="write auto, cpu, cuda or cuda:1")
    if kind == "cpu":
        return None
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "auto" and count == 0:
        return None
    if count == 0:
        built = torch.version.cuda or "none"
        raise Unsupported(
            f"CUDA was asked for (`{device}`) and no card is usable: torch {torch.__version__}, built for CUDA {built}",
            hint="use --device cpu, or install a CUDA build of torch and a driver",
        )
    index = int(index_text or 0)
    if index >= count:
        raise Unsupported(f"no device `{device}`: this host has {count}", hint=f"the last one is cuda:{count - 1}")
    return index


def _ask_driver(index: int) -> tuple[str | None, float | None]:
    """The driver's version and the card's power limit in watts; None where nvidia-smi cannot say."""
    ask = ["nvidia-smi", f"--id={index}", "--query-gpu=driver_version,power.limit", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout
        driver, power_limit_w = answer.strip().split(", ")
        return driver, float(power_limit_w)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None, None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
