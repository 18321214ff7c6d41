#!/usr/bin/env python3
"""Measures what our reading gets out of a file beside what `dd` gets of it, cold and warm, in turns.

Takes    a folder on the disk to be measured, with room for a file; how large it is to be.
Gives    one record of kind "read-rate" on stdout, every rate in GB/s; exit 1 if the median falls below 0.8 x `dd` cold,
         or 0.8 x a loop into the same memory warm.
Knows nothing of what else the disk does meanwhile: the turns show it.

    python scripts/read_rate.py --folder runs --gib 4 >> records.jsonl

Cold is a file whose pages the kernel has dropped (POSIX_FADV_DONTNEED after a sync); the share of a sample that stayed
all the same is told. `dd` reads every piece into the same 16 MiB; warm, that memory is the processor's cache, so a
plain loop into memory as large as our ring is measured too ("into a ring").
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from frontier.case import Case
from frontier.data.files import PIECE_BYTES, open_source
from frontier.machine import Machine
from frontier.record import Record
from frontier.runner import facts_of_now
from frontier.spans import Span, cut
from frontier.units import GIB, MIB

WALL_SHARE = 0.8


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the file is made, and removed again")
    parser.add_argument("--gib", type=float, default=4.0, help="its size")
    parser.add_argument("--turns", type=int, default=5, help="how often each is measured")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        record = measure(Path(folder) / "x.npy", int(given.gib * GIB), given.turns)
    print(record.to_json())
    judged = {name: share for name, share in record.notes["share_of_dd"].items() if name != "warm"}
    slow = [name for name, share in judged.items() if share < WALL_SHARE]
    print(f"share of dd: {record.notes['share_of_dd']}" + f"; below {WALL_SHARE}: {slow}" * bool(slow), file=sys.stderr)
    raise SystemExit(1 if slow else 0)


def measure(path: Path, num_bytes: int, turns: int) -> Record:
    row_bytes = 128 * MIB
    case = Case.load("14").override(batch_size=max(4, num_bytes // row_bytes), seq_len=row_bytes // 4096, d_model=1024)
    make_file(path, case)
    machine = Machine.detect("cpu")
    ring = [torch.ones(1, case.seq_len, case.d_model) for _ in range(3)]  # touched, as the ring's slots are
    source = open_source(path, case, threads=min(8, machine.cores))

    def ours() -> None:
        for row in range(case.batch_size):
            source.read(Span(row, row + 1), ring[row % len(ring)])

    ways: dict[str, Callable[[], None]] = {
        "ours": ours,
        "dd": lambda: dd(path),
        "dd, direct": lambda: dd(path, "iflag=direct"),
        "into a ring": lambda: read_in_turn(path, ring),
    }
    found: dict[str, list[float]] = {}
    stayed = 0.0
    for turn in range(turns):
        for name in list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]:
            for state in ("cold",) if "direct" in name else ("cold", "warm"):
                if state == "cold":
                    stayed = max(stayed, drop_pages(path))
                began_s = time.perf_counter()
                ways[name]()
                found.setdefault(f"{name}, {state}", []).append(num_gb(case) / (time.perf_counter() - began_s))
    source.close()
    median = {name: statistics.median(rates) for name, rates in found.items()}
    return Record(
        kind="read-rate",
        **facts_of_now(machine),
        case=case.as_dict(),
        recipe=source.how,
        input="file",
        notes={
            "gbps": {name: [round(rate, 3) for rate in rates] for name, rates in found.items()},
            "share_of_dd": {
                "cold": round(median["ours, cold"] / median["dd, cold"], 3),
                "warm": round(median["ours, warm"] / median["dd, warm"], 3),
                "warm, of a loop into a ring": round(median["ours, warm"] / median["into a ring, warm"], 3),
            },
            "file_bytes": case.input_bytes,
            "stayed_in_cache": round(stayed, 4),
            "filesystem": subprocess.run(
                ["stat", "-f", "-c", "%T", path.parent], capture_output=True, text=True, check=True
            ).stdout.strip(),
        },
    )


def num_gb(case: Case) -> float:
    return case.input_bytes / 1e9


def make_file(path: Path, case: Case) -> None:
    """An .npy file of the case's shape; the values are of no account but must not compress to nothing."""
    shape = (case.batch_size, case.seq_len, case.d_model)
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        piece = np.random.default_rng(1).standard_normal(PIECE_BYTES // 4).astype(np.float32).tobytes()
        for span in cut(case.input_bytes, len(piece)):
            file.write(piece[: len(span)])
        file.flush()
        os.fsync(file.fileno())


def drop_pages(path: Path) -> float:
    """Have the kernel forget the file; the share of a sample of pages that a read finds without the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        places = range(0, os.fstat(fd).st_size - 4096, os.fstat(fd).st_size // 64)
        return sum(in_cache(fd, place) for place in places) / len(places)
    finally:
        os.close(fd)


def in_cache(fd: int, at_bytes: int) -> bool:
    try:
        return os.preadv(fd, [bytearray(1)], at_bytes, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError:  # a filesystem that cannot say, such as tmpfs, is all cache
        return True


def dd(path: Path, *flags: str) -> None:
    subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=16M", *flags], capture_output=True, check=True)


def read_in_turn(path: Path, ring: list[torch.Tensor]) -> None:
    """What `dd` does, into memory that is as large as ours."""
    slots = [memoryview(slot.view(-1).view(torch.uint8).numpy().data) for slot in ring]
    with open(path, "rb", buffering=0) as file:
        at = 0
        while got := file.readinto(slots[at // len(slots[0]) % len(slots)][at % len(slots[0]) :][:PIECE_BYTES]):
            at += got


if __name__ == "__main__":
    main()
