#!/usr/bin/env python3
"""Streams a file several times as large as the host budget inside a memory cgroup of just that budget.

Takes    a budget, a folder with room for input and output, and what else to say to `frontier run`, after `--`.
Gives    one JSON line: planned, measured and allowed bytes; exit 0 if all held, 1 if not, 3 if no cgroup can be made.
Knows nothing of how the run keeps within its plan: the kernel ends what exceeds the cgroup, page cache included.

    python scripts/host_memory.py --folder runs --host-budget 768MiB
    python scripts/host_memory.py --folder runs --host-budget 4GiB --seq-len 1048576 --d-model 1024 --times 1 \\
        -- --device cuda --device-budget 4GiB --flow chunked
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from frontier.units import parse_bytes, show_bytes

CASE = """name = "host-memory"
batch_size = {rows}
seq_len = {seq_len}
d_model = {d_model}
heads = {heads}
ffn_dim = {d_model}
layers = 1
causal = true
"""
PIECE_BYTES = 16 << 20
FRONTIER = [sys.executable, "-c", "from frontier.cli import cli; cli()"]


class NoCgroup(Exception):
    """Why no memory cgroup can be made here, in one sentence."""


class Files(NamedTuple):
    """What version 1 and version 2 call the same things."""

    limit: str
    peak: str
    events: str


V1 = Files("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control")
V2 = Files("memory.max", "memory.peak", "memory.events")


def own_cgroup() -> Path:
    """The memory cgroup that this process is in.

    Raises   NoCgroup.
    """
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, name = line.split(":", 2)
        base = Path("/sys/fs/cgroup", *(["memory"] if controllers else []))
        if "memory" in controllers.split(",") or (not controllers and (base / "cgroup.controllers").exists()):
            return base / name.lstrip("/")
    raise NoCgroup("this kernel shows no memory cgroup")


@contextmanager
def limited(parent: Path, limit_bytes: int) -> Iterator[tuple[Path, Files]]:
    """A cgroup of its own under `parent`, so that no outer limit is escaped; gone at the end.

    Raises   NoCgroup.
    """
    group = parent / f"frontier_host_memory_{os.getpid()}"
    try:
        group.mkdir()
    except OSError as reason:
        raise NoCgroup(f"no cgroup can be made in {parent}: {reason.strerror}") from None
    try:
        files = V2 if (group / "cgroup.controllers").exists() else V1
        if not (group / files.limit).exists():
            raise NoCgroup(
                f"{parent} does not hand its memory controller down: `+memory` in its cgroup.subtree_control"
            )
        (group / files.limit).write_text(str(limit_bytes), encoding="ascii")
        yield group, files
    finally:
        for _ in range(50):  # what was killed may take a moment to leave
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def run_in(group: Path, command: list[str]) -> tuple[int, str]:
    """(exit code or minus the signal, stdout) of a command that starts its life in the group."""
    enter = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group), *command]
    with subprocess.Popen(enter, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.read()
    return process.returncode, said


def count_kills(group: Path, files: Files) -> int:
    counts = dict(line.split() for line in (group / files.events).read_text(encoding="ascii").splitlines())
    return int(counts["oom_kill"])


def make_input(path: Path, rows: int, seq_len: int, d_model: int) -> None:
    """A .npy file of normal values, one piece over and over: its bytes are on the disk, not in page cache."""
    piece = np.random.default_rng(0).standard_normal(PIECE_BYTES // 4, dtype=np.float32).tobytes()
    with path.open("wb") as file:
        shape = (rows, seq_len, d_model)
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        left_bytes = 4 * rows * seq_len * d_model
        while left_bytes:
            left_bytes -= file.write(piece[:left_bytes])
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The run, and beside it the control: a process that holds a quarter more than the budget must be killed."""
    budget_bytes = options.host_budget
    rows = max(1, options.times * budget_bytes // (4 * options.seq_len * options.d_model))
    with limited(options.cgroup or own_cgroup(), budget_bytes) as (group, files):
        greedy = [sys.executable, "-c", f"held = b'x' * {budget_bytes * 5 // 4}"]
        control_code = run_in(group, greedy)[0]
    make_input(folder / "x.npy", rows, options.seq_len, options.d_model)
    heads = max(1, options.d_model // 64)
    case = CASE.format(rows=rows, seq_len=options.seq_len, d_model=options.d_model, heads=heads)
    (folder / "case.toml").write_text(case, encoding="utf-8")
    command = [*FRONTIER, "run", "--case", str(folder / "case.toml"), "--input", str(folder / "x.npy")]
    command += ["--output", str(folder / "y.npy"), "--run-dir", str(folder / "run"), "--host-budget", str(budget_bytes)]
    command += ["--watch", "none", "--json", "--quiet", *options.more]
    with limited(options.cgroup or own_cgroup(), budget_bytes) as (group, files):
        exit_code, said = run_in(group, command)
        peak_bytes, kills = int((group / files.peak).read_text(encoding="ascii")), count_kills(group, files)
    record = json.loads(said) if exit_code == 0 else {}
    planned_bytes = record.get("host_planned_bytes", 0)
    # The run's own word, from the kernel's account of its memory: what a parent is told of a child's peak counts
    # the parent's own memory too, which the child had until it became another program.
    peak_rss_bytes = record.get("host_peak_bytes", 0)
    held = exit_code == 0 and kills == 0 and peak_rss_bytes <= planned_bytes <= budget_bytes
    return {
        "held": held and control_code == -signal.SIGKILL,
        "budget_bytes": budget_bytes,
        "input_bytes": (folder / "x.npy").stat().st_size,
        "output_bytes": (folder / "y.npy").stat().st_size if exit_code == 0 else 0,
        "planned_bytes": planned_bytes,
        "peak_rss_bytes": peak_rss_bytes,
        "cgroup_peak_bytes": peak_bytes,
        "kills": kills,
        "exit_code": exit_code,
        "control_exit_code": control_code,
        "pass_s": record.get("pass_s"),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="Where input and output lie meanwhile: on a disk.")
    parser.add_argument(
        "--host-budget", type=parse_bytes, default=parse_bytes("768MiB"), help="And the cgroup's limit."
    )
    parser.add_argument("--times", type=int, default=4, help="The file's size, in budgets.")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--d-model", type=int, default=16)
    parser.add_argument("--cgroup", type=Path, help="A cgroup to work in, instead of this process's own.")
    parser.add_argument("more", nargs="*", help="Options for `frontier run`, after `--`.")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="host_memory_", dir=options.folder))
    try:
        found = measure(options, folder)
    except NoCgroup as reason:
        print(f"error: {reason}\nhint: as root, name a cgroup that hands memory down with --cgroup", file=sys.stderr)
        return 3
    finally:
        shutil.rmtree(folder)
    sizes = {name: show_bytes(size) for name, size in found.items() if name.endswith("_bytes")}
    print(" ".join(f"{name.removesuffix('_bytes')} {size}," for name, size in sizes.items()), file=sys.stderr)
    print(json.dumps(found))
    return 0 if found["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
