#!/usr/bin/env python3
"""What the series of long rows measures beside runs: a kernel alone, a disk alone, what a journal costs.

Takes    which of them, sizes, folders.
Gives    one record on stdout, of kind "kernel", "disk" or "journal"; `disk` leaves a seeded input in two places.
Knows nothing of the series or of other records.

    python scripts/long_parts.py kernel fp16/packed/cudnn --seq-len 1048576
    python scripts/long_parts.py disk /dev/shm/x.npy runs/x.npy --seq-len 1048576
    python scripts/long_parts.py journal fp16/packed/cudnn --folder runs --batch-size 16
"""

import argparse
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frontier.case import Case
from frontier.chooser import choose
from frontier.data.generate import SeededSource
from frontier.data.npy_header import npy_header
from frontier.data.sinks import FileSink
from frontier.layers.attention import ATTENTION, Attend
from frontier.layers.weights import working_dtype
from frontier.machine import Machine
from frontier.planner import USUAL_CHUNK, Keeping, plan
from frontier.recipe import REFERENCE, parse_recipe
from frontier.record import Record
from frontier.rundir import RunDir
from frontier.runner import Choices, facts_of_now, run
from frontier.spans import Span, cut
from frontier.units import MIB

PIECE_BYTES, PIECE_POSITIONS = 16 * MIB, 65_536


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    kernel = parts.add_parser("kernel", help="one plain call of an attention kernel on a whole row, and on a chunk")
    kernel.add_argument("recipe")
    kernel.add_argument("--calls", type=int, default=2)
    disk = parts.add_parser("disk", help="a seeded row made as a file, copied to a disk and read back")
    disk.add_argument("path", type=Path, help="where it is made")
    disk.add_argument("copy", type=Path, help="its copy, on the disk that is measured")
    journal = parts.add_parser("journal", help="runs to a file, with a run directory's journal and without, in turns")
    journal.add_argument("recipe")
    journal.add_argument("--folder", type=Path, required=True)
    journal.add_argument("--turns", type=int, default=2)
    for part in (kernel, disk, journal):
        part.add_argument("--device", default="auto")
        for size in ("--batch-size", "--seq-len", "--d-model", "--heads", "--ffn-dim"):
            part.add_argument(size, type=int)
    given = parser.parse_args()
    case = Case.load("14").override(
        batch_size=given.batch_size if given.part == "journal" else 1,
        seq_len=given.seq_len,
        d_model=given.d_model,
        heads=given.heads,
        ffn_dim=given.ffn_dim,
        layers=None if given.part == "journal" else 1,
    )
    machine = Machine.detect(given.device)
    measure = {"kernel": measure_kernel, "disk": measure_disk, "journal": measure_journal}[given.part]
    print(measure(case, machine, given).to_json())


def measure_kernel(case: Case, machine: Machine, given: Any) -> Record:
    """Calls on q, k and v `[1, S, H, K]` that lie on the device; the fastest call is the kernel's own rate."""
    recipe = parse_recipe(given.recipe, REFERENCE)
    attend, device = ATTENTION[recipe.attention].attend, torch.device(machine.device)
    chunk = min(USUAL_CHUNK[machine.has_card], case.seq_len)
    q, k, v = (
        torch.randn(1, case.seq_len, case.heads, case.head_width, device=device, dtype=working_dtype(recipe))
        for _ in range(3)
    )
    part = [t[:, :chunk] for t in (q, k, v)]
    call_s(attend, part, True)  # compiles what is compiled
    chunks_s = [call_s(attend, part, False) for _ in range(6)][1:]
    whole_s = [call_s(attend, [q, k, v], True) for _ in range(given.calls)]
    return Record(
        kind="kernel",
        **facts_of_now(machine),
        case=case.as_dict(),
        recipe=str(recipe),
        flops=case.attention_flops_per_row,
        notes={
            "calls_s": [round(seconds, 4) for seconds in whole_s],
            "attention_tflops": round(case.attention_flops_per_row / min(whole_s) / 1e12, 4),
            "chunk": chunk,
            "chunk_tflops": round(4 * case.d_model * chunk**2 / statistics.median(chunks_s) / 1e12, 4),
        },
    )


def call_s(attend: Attend, operands: list[Tensor], causal: bool) -> float:
    cuda = operands[0].is_cuda
    if cuda:
        torch.cuda.synchronize()
    began_s = time.perf_counter()
    attend(*operands, causal)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began_s


def measure_disk(case: Case, machine: Machine, given: Any) -> Record:
    """GB/s of plain sequential writing with a sync, and of reading from the disk past the cache and through it."""
    make_row(given.path, case, machine.cores)
    rates: dict[str, float | None] = {"write and sync": gbps(case, lambda: copy(given.path, given.copy))}
    for name, flags in (("dd, direct", ["iflag=direct"]), ("dd, cold", [])):
        forget(given.copy)
        try:
            rates[name] = gbps(case, lambda flags=flags: dd(given.copy, flags))
        except subprocess.CalledProcessError:  # a filesystem without direct reads
            rates[name] = None
    forget(given.copy)
    return Record(
        kind="disk",
        **facts_of_now(machine),
        case=case.as_dict(),
        recipe="none",
        input="file",
        output="file",
        notes={"gbps": rates, "file_bytes": case.input_bytes},
    )


def make_row(path: Path, case: Case, threads: int) -> None:
    """The case's seeded rows as an .npy file."""
    source = SeededSource(case, threads)
    with path.open("wb") as file:
        file.write(npy_header((case.batch_size, case.seq_len, case.d_model)))
        for positions in cut(case.seq_len, PIECE_POSITIONS):
            x_BSD = torch.empty(1, len(positions), case.d_model)
            source.read(Span(0, 1), x_BSD, positions)
            file.write(x_BSD.numpy().data)
    source.close()


def copy(path: Path, into: Path) -> None:
    with path.open("rb", buffering=0) as source, into.open("wb", buffering=0) as file:
        while piece := source.read(PIECE_BYTES):
            file.write(piece)
        os.fsync(file.fileno())


def dd(path: Path, flags: list[str]) -> None:
    subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=16M", *flags], capture_output=True, check=True)


def forget(path: Path) -> None:
    """Have the kernel drop the file's pages."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def gbps(case: Case, work: Any) -> float:
    began_s = time.perf_counter()
    work()
    return round(case.input_bytes / 1e9 / (time.perf_counter() - began_s), 3)


def measure_journal(case: Case, machine: Machine, given: Any) -> Record:
    """Seconds of the pass and of the whole run up to the file's name, in turns; weights are written with a journal."""
    recipe = choose(case, machine, given.recipe).recipe
    made = plan(case, machine, recipe, Keeping(output="file"))
    path, folder = given.folder / "journal.npy", given.folder / "journal"
    found: dict[str, list[dict[str, float]]] = {"with": [], "without": []}
    try:
        for turn in range(2 * given.turns + 1):
            name = "without" if turn % 2 else "with"
            began_s = time.perf_counter()
            sink, choices = FileSink(path, case, overwrite=True, threads=min(8, machine.cores)), Choices(watch=())
            if name == "with":
                with RunDir(folder, overwrite=True) as kept:
                    record = run(made, None, sink, choices=choices, run_dir=kept, output="file")
            else:
                record = run(made, None, sink, choices=choices, output="file")
            took = {"pass_s": round(record.pass_s[0], 3), "run_s": round(time.perf_counter() - began_s, 3)}
            if turn:  # the first warms up
                found[name].append(took)
    finally:
        path.unlink(missing_ok=True)
    medians = {
        name: {key: statistics.median(took[key] for took in many) for key in ("pass_s", "run_s")}
        for name, many in found.items()
    }
    return Record(
        kind="journal",
        **facts_of_now(machine),
        case=case.as_dict(),
        recipe=str(recipe),
        output="file",
        notes={
            "turns": found,
            "pass_share": round(medians["with"]["pass_s"] / medians["without"]["pass_s"] - 1, 4),
            "run_share": round(medians["with"]["run_s"] / medians["without"]["run_s"] - 1, 4),
            "journal_lines": len((folder / "journal.jsonl").read_text().splitlines()),
        },
    )


if __name__ == "__main__":
    main()
