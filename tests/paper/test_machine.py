"""What the host may still give: the kernel's word within every cgroup limit; devices by name."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import frontier.machine as machine_module
from frontier.errors import Unsupported
from frontier.machine import Machine, _cgroup_memory, _count_cores, host_available_bytes, host_peak_bytes
from frontier.units import GIB

KERNEL_SAYS = 100 * GIB


@pytest.fixture(autouse=True)
def roomy_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=KERNEL_SAYS, total=2 * KERNEL_SAYS))


class Host:
    """Fake /proc and /sys/fs/cgroup trees."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroup = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()

    def belongs_to(self, *lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text("\n".join(lines) + "\n")

    def v2(self, path: str, limit: str, used: int, **stat: int) -> None:
        self._level(self.cgroup / path, "memory.max", limit, "memory.current", used, stat)

    def v1(self, path: str, limit: int, used: int, **stat: int) -> None:
        place = self.cgroup / "memory" / path
        self._level(place, "memory.limit_in_bytes", str(limit), "memory.usage_in_bytes", used, stat)

    def _level(self, place: Path, limit_file: str, limit: str, used_file: str, used: int, stat: dict[str, int]) -> None:
        place.mkdir(parents=True, exist_ok=True)
        (place / limit_file).write_text(f"{limit}\n")
        (place / used_file).write_text(f"{used}\n")
        (place / "memory.stat").write_text("".join(f"{key} {value}\n" for key, value in {"anon": 1, **stat}.items()))

    def available(self) -> int:
        return host_available_bytes(self.proc, self.cgroup)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_without_cgroups_the_kernels_word_stands(host: Host) -> None:
    assert host.available() == KERNEL_SAYS
    host.belongs_to("0::/")
    assert host.available() == KERNEL_SAYS


@pytest.mark.parametrize("path", ["", "pod/box"])
def test_a_v2_limit_leaves_what_is_not_used(host: Host, path: str) -> None:
    host.belongs_to(f"0::/{path}")
    host.v2(path, str(16 * GIB), 5 * GIB)
    assert host.available() == 11 * GIB


@pytest.mark.parametrize("path", ["", "docker/abc"])
def test_a_v1_limit_leaves_what_is_not_used(host: Host, path: str) -> None:
    host.belongs_to("12:cpu,cpuacct:/x", f"4:memory:/{path}", "0::/ignored")
    host.v1(path, 16 * GIB, 5 * GIB)
    assert host.available() == 11 * GIB


def test_a_v1_limit_counts_where_memory_shares_its_line(host: Host) -> None:
    host.belongs_to("4:cpu,memory:/")
    host.v1("", 16 * GIB, 5 * GIB)
    assert host.available() == 11 * GIB


def test_a_v1_path_of_the_host_is_found_at_the_containers_root(host: Host) -> None:
    host.belongs_to("4:memory:/docker/not-mounted-in-here")
    host.v1("", 16 * GIB, 5 * GIB)
    assert host.available() == 11 * GIB


@pytest.mark.parametrize(("outer", "inner", "left"), [(8, 32, 6), (32, 8, 7), (3, 32, 1)])
def test_of_nested_cgroups_the_tightest_counts(host: Host, outer: int, inner: int, left: int) -> None:
    host.belongs_to("0::/pod/box")
    host.v2("pod", str(outer * GIB), 2 * GIB)
    host.v2("pod/box", str(inner * GIB), 1 * GIB)
    assert host.available() == left * GIB
    assert _cgroup_memory(host.proc, host.cgroup) == [(inner * GIB, GIB), (outer * GIB, 2 * GIB)]


def test_a_neighbours_limit_does_not_count(host: Host) -> None:
    host.belongs_to("0::/pod/box")
    host.v2("pod/other", str(GIB), 0)
    assert host.available() == KERNEL_SAYS


def test_max_and_the_v1_number_near_2_to_the_63_are_no_limit(host: Host) -> None:
    host.belongs_to("0::/box", "4:memory:/")
    host.v2("box", "max", 5 * GIB)
    host.v1("", 9223372036854771712, 5 * GIB)
    assert host.available() == KERNEL_SAYS


def test_page_cache_does_not_count_as_used(host: Host) -> None:
    host.belongs_to("0::/")
    host.v2("", str(16 * GIB), 15 * GIB, inactive_file=12 * GIB)
    assert host.available() == 13 * GIB


def test_page_cache_of_v1_is_the_whole_subtrees(host: Host) -> None:
    host.belongs_to("4:memory:/")
    host.v1("", 16 * GIB, 15 * GIB, inactive_file=1 * GIB, total_inactive_file=12 * GIB)
    assert host.available() == 13 * GIB


def test_a_full_cgroup_leaves_nothing_and_never_less(host: Host) -> None:
    host.belongs_to("0::/")
    host.v2("", str(4 * GIB), 5 * GIB)
    assert host.available() == 0


@pytest.mark.parametrize("lost", ["memory.max", "memory.current", "memory.stat"])
def test_a_level_that_cannot_be_read_is_passed_over(host: Host, lost: str) -> None:
    host.belongs_to("0::/pod/box")
    host.v2("pod", str(16 * GIB), 5 * GIB)
    host.v2("pod/box", str(GIB), 0)
    (host.cgroup / "pod/box" / lost).unlink()
    assert host.available() == 11 * GIB


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:-1", "tpu:0", "", "CUDA"])
def test_a_device_of_no_such_name_is_refused_with_the_form(device: str) -> None:
    with pytest.raises(Unsupported, match=f"no device `{device}`") as caught:
        Machine.detect(device)
    assert caught.value.hint == "write auto, cpu, cuda or cuda:1" and caught.value.exit_code == 3


@pytest.fixture
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:3"])
def test_a_card_that_is_asked_for_and_missing_is_refused(no_card: None, device: str) -> None:
    with pytest.raises(
        Unsupported, match=rf"CUDA was asked for \(`{device}`\) and no card is usable: torch \d"
    ) as caught:
        Machine.detect(device)
    assert "--device cpu" in str(caught.value.hint)


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_without_a_card_the_cpu_serves(no_card: None, device: str) -> None:
    machine = Machine.detect(device)
    assert (machine.device, machine.has_card, machine.capability, machine.capability_text) == (
        "cpu",
        False,
        None,
        "none",
    )
    assert machine.name and machine.cores >= 1


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (70 * GIB, 80 * GIB))
    found = SimpleNamespace(name="Made-up", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)


@pytest.mark.parametrize(("device", "found"), [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")])
def test_a_card_is_found_by_its_name(two_cards: None, device: str, found: str) -> None:
    machine = Machine.detect(device)
    assert (machine.device, machine.capability_text, machine.name) == (found, "9.0", "Made-up")
    assert machine.device_budget_bytes == 70 * GIB + machine_module.CONTEXT_BYTES
    assert Machine.detect(device, device_budget_bytes=12 * GIB).device_budget_bytes == 12 * GIB


def test_a_card_past_the_last_is_refused_with_the_last(two_cards: None) -> None:
    with pytest.raises(Unsupported, match="no device `cuda:2`: this host has 2") as caught:
        Machine.detect("cuda:2")
    assert caught.value.hint == "the last one is cuda:1"


def test_a_budget_past_the_card_is_refused_with_both_values(two_cards: None) -> None:
    with pytest.raises(Unsupported, match=r"a device budget of 90\.00 GiB exceeds the card's 80\.00 GiB") as caught:
        Machine.detect("cuda", device_budget_bytes=90 * GIB)
    assert "--device-budget" in str(caught.value.hint)


@pytest.fixture
def ten_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "host_available_bytes", lambda: 10 * GIB)


def test_budgets_that_are_not_given_are_what_is_free(ten_gib: None) -> None:
    machine = Machine.detect("cpu")
    assert machine.host_budget_bytes == machine.device_budget_bytes == 9 * GIB
    assert machine.pinned_budget_bytes == 9 * GIB // 2


def test_budgets_that_are_given_are_believed(ten_gib: None) -> None:
    machine = Machine.detect("cpu", device_budget_bytes=2 * GIB, host_budget_bytes=4 * GIB, pinned_budget_bytes=GIB)
    assert (machine.device_budget_bytes, machine.host_budget_bytes) == (2 * GIB, 4 * GIB)
    assert machine.pinned_budget_bytes == GIB


def test_a_pinned_budget_above_the_hosts_is_refused_with_both(ten_gib: None) -> None:
    with pytest.raises(Unsupported, match=r"6\.00 GiB exceeds the host budget of 4\.00 GiB"):
        Machine.detect("cpu", host_budget_bytes=4 * GIB, pinned_budget_bytes=6 * GIB)


@pytest.mark.parametrize(("text", "most"), [("max 100000", 8), ("150000 100000", 2), ("1000 100000", 1), ("junk", 8)])
def test_a_containers_quota_bounds_the_cores(host: Host, monkeypatch: pytest.MonkeyPatch, text: str, most: int) -> None:
    monkeypatch.setattr(machine_module.os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    assert _count_cores(host.cgroup) == 8
    (host.cgroup / "cpu.max").write_text(f"{text}\n")
    assert _count_cores(host.cgroup) == most


def test_the_peak_of_memory_is_this_programs_own_and_not_its_parents(tmp_path: Path) -> None:
    """A parent that holds 300 MiB more than a small child: the child's peak must not show them."""
    ask = "from frontier.machine import host_peak_bytes; print(host_peak_bytes())"
    run = f"subprocess.run([sys.executable, '-c', {ask!r}], capture_output=True, text=True).stdout"
    start = f"import subprocess, sys; held = b'x' * (300 << 20); print({run})"
    told = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=True).stdout
    assert 5 << 20 < int(told) < 200 << 20
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text("VmPeak:  9 kB\nVmHWM:\t  2048 kB\n")
    assert host_peak_bytes(tmp_path) == 2 << 20
    assert host_peak_bytes(tmp_path / "none") > 10 << 20
