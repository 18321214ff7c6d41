#!/usr/bin/env python3
"""The whole series of rows that are cut into chunks, on one card, in one go, since card time is scarce.

Takes    a file for records, a fast folder (memory) and one on the disk, seconds to spend; the commit, without history.
Gives    a record a line, on the disk as soon as there is one; exit 1 if a step failed, which stops no other.
Knows nothing of how a run is made or judged: each is a command of its own.

    python scripts/long_rows.py --output long.jsonl --seconds 560
    python scripts/long_rows.py --output toy.jsonl --toy --fast-folder runs

Steps come in order of worth; one that would not end in time is left out. `--toy` is the same at lengths for a CPU.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from series import FRONTIER, REFEREE, slug, summary

from frontier.case import Case
from frontier.record import EvidenceFile, Record, commit, source_sha256, versions

SCRIPTS = Path(__file__).resolve().parent


class Sizes(NamedTuple):
    """Lengths, and words that every run gets; `cut` is for a machine that holds such rows whole."""

    long: int = 1 << 20
    longest: int = 1 << 22
    judged: int = 1 << 18
    chunk_error: int = 1 << 16
    shape: tuple[str, ...] = ()
    rows_of_14: tuple[str, ...] = ()
    device: str = "cuda"
    recipes: tuple[str, str] = ("fp16/packed/cudnn", "fp16/packed/fa4")
    cut: tuple[str, ...] = ()
    positions: int = 4096
    host_budget: str = "64GiB"
    journal_rows: int = 16
    disk_gib: float = 2.0
    turns: int = 3
    in_cgroup: str = "--host-budget 4GiB --seq-len 262144 --d-model 1024 --times 2 -- --flow chunked"


TOY = Sizes(
    long=2048, longest=4096, judged=1024, chunk_error=256, device="cpu", recipes=("fp32/packed/flash",) * 2,
    shape=("--d-model", "64", "--heads", "4", "--ffn-dim", "64"), rows_of_14=("--batch-size", "3", "--seq-len", "600"),
    cut=("--chunk", "300"), positions=600, host_budget="6GiB", journal_rows=3, disk_gib=0.01, turns=1,
    in_cgroup="--host-budget 640MiB --times 1 --",
)  # fmt: skip


class Failed(Exception):
    """A command gave no record; why, in a line."""


class Step(NamedTuple):
    """Works by name, done side by side if there are several; `about_s` for all, `kind` of a record of failure."""

    about_s: float
    kind: str
    works: dict[str, Callable[[str], None]]


class Series:
    """What the steps share: folders, the records so far, the time that is left."""

    def __init__(self, options: Any, sizes: Sizes) -> None:
        self.options, self.sizes = options, sizes
        self.ends_s = time.monotonic() + options.seconds
        self.runs = Path(options.disk_folder) / "series"
        self.runs.mkdir(parents=True, exist_ok=True)
        self.failed: list[str] = []
        self._evidence, self._lock = EvidenceFile(options.output), threading.Lock()
        known = versions(), source_sha256(), options.commit or commit(), "unknown"
        self._facts: dict[str, Any] = dict(zip(("versions", "source_sha256", "commit", "machine"), known, strict=True))

    def do(self, steps: list[Step]) -> None:
        for step in steps:
            left_s = self.ends_s - time.monotonic()
            if step.works and step.about_s > left_s:
                say(f"LEFT OUT {', '.join(step.works)}: about {step.about_s:.0f} s, {left_s:.0f} s are left")
                continue
            with ThreadPoolExecutor(max(1, len(step.works))) as pool:
                for name, work in step.works.items():
                    pool.submit(self._attempt, name, work, step.kind)

    def _attempt(self, name: str, work: Callable[[str], None], kind: str) -> None:
        """One work; whatever it dies of is kept as a record, unless it has one already."""
        try:
            work(name)
        except Exception as reason:
            say(f"FAILED {name}: {reason}")
            self.failed.append(name)
            case = Case.load("14").as_dict()
            told = str(reason) or type(reason).__name__
            self.put(name, Record(kind=kind, case=case, recipe="none", refused=told, **self.facts("long_rows.py")))

    def facts(self, command: str) -> dict[str, Any]:
        """What a record says of its making that a command did not say itself."""
        return self._facts | {"command": command, "started": datetime.now(UTC).isoformat(timespec="seconds")}

    def put(self, name: str, record: Record, **notes: Any) -> None:
        notes = {**record.notes, **notes, "name": name, "series": "long rows"}
        record = dataclasses.replace(record, commit=self.options.commit or record.commit, notes=notes)
        with self._lock:
            if not record.refused:
                self._facts |= {key: getattr(record, key) for key in self._facts}
            self._evidence.put(record, lambda known: known.notes.get("name") == name and known.kind == record.kind)

    def call(self, command: list[str], may_fail: bool = False) -> tuple[str, float]:
        """Standard output and seconds; its talk goes to our stderr, its last error line into what is raised."""
        began_s = time.monotonic()
        with tempfile.TemporaryFile("w+") as talk:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=talk, text=True, start_new_session=True)
            try:
                said = process.communicate(timeout=max(1.0, self.ends_s - began_s))[0]
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                said = process.communicate()[0]
            seconds = time.monotonic() - began_s
            talk.seek(0)
            lines = [line for line in talk.read().splitlines() if line.strip()]
        say(f"[{seconds:6.1f} s, exit {process.returncode}] {shlex.join(command[1:])[-150:]}")
        for line in lines[-6:]:
            say(f"    {line}")
        if process.returncode and not may_fail:
            errors = [line for line in lines if "error" in line.lower()] or lines or ["it said nothing"]
            late = "stopped: its time was up; " if process.returncode == -signal.SIGKILL else ""
            raise Failed(f"{late}exit {process.returncode}: {errors[-1][:300]}")
        return said, seconds

    def run(self, name: str, words: list[str], budget: str | None = None, **notes: Any) -> None:
        """One `frontier run` and its record."""
        folder = self.runs / slug(name)
        shutil.rmtree(folder, ignore_errors=True)
        sizes = self.sizes
        words = ["--case", "14", *sizes.shape, *words, "--no-ceilings", "--host-budget", sizes.host_budget]
        words += ["--device", sizes.device] + (["--device-budget", budget] if budget else [])
        try:
            said, seconds = self.call([*FRONTIER, "run", *words, "--run-dir", str(folder), "--json", "--quiet"])
        finally:
            for place in (self.options.fast_folder, self.options.disk_folder):
                for path in Path(place).glob("long_y.npy*"):
                    path.unlink()
        # A trace lies beside the records, wherever these go; the command is told without that place.
        told = [Path(word).name if word.endswith(".trace.json") else word for word in words]
        record = dataclasses.replace(Record.from_json(said), command=shlex.join(["frontier", "run", *told]))
        notes |= {"device_budget": budget} if budget else {}
        self.put(name, record, command_s=round(seconds, 2), **notes)

    def script(self, name: str, file: str, words: list[str]) -> None:
        """A script of ours that prints one record a line, and may end in an exit code that judges it."""
        said, seconds = self.call([sys.executable, str(SCRIPTS / file), *words], may_fail=True)
        lines = [line for line in said.splitlines() if line.startswith("{")]
        if not lines:
            raise Failed(f"{file} gave no record; its last words are in the log")
        for line in lines:
            record = Record.from_json(line)
            own = f"{name}, {record.recipe}" if len(lines) > 1 else name
            self.put(own, record, command_s=round(seconds, 2))

    def host_memory(self, name: str) -> None:
        """Prints no record but facts, and exit 3 where no cgroup can be made: that is a failure, told as such."""
        words = ["--folder", str(self.runs), *self.sizes.in_cgroup.split(), "--device", self.sizes.device]
        said, _ = self.call([sys.executable, str(SCRIPTS / "host_memory.py"), *words], may_fail=True)
        if not said.strip():
            raise Failed("no memory cgroup can be made here; the reason is in the log")
        notes = json.loads(said.splitlines()[-1])
        facts = self.facts(shlex.join(["host_memory.py", *words]))
        self.put(name, Record(kind="host-memory", case=Case.load("14").as_dict(), recipe="none", **facts), **notes)

    def judge(self, name: str, words: list[str]) -> None:
        """The referee's word on a run of ours, put into that run's record. `name` is the run's with `judged `."""
        of = name.removeprefix("judged ")
        folder = self.runs / slug(of)
        record = next((r for r in self._evidence.records if r.kind == "run" and r.notes.get("name") == of), None)
        if record is None or record.refused:
            raise Failed(f"there is no run {of!r} to be judged")
        self.call([*REFEREE, "check", str(folder), "--device", self.sizes.device, *words], may_fail=True)
        if not (folder / "verdict.json").is_file():
            raise Failed("the referee gave no verdict; its last words are in the log")
        verdict = json.loads((folder / "verdict.json").read_text())
        told = summary(verdict) | {key: verdict[key] for key in ("device", "estimated_s", "work")}
        self.put(of, dataclasses.replace(record, verdicts={**record.verdicts, "referee": told}))
        shutil.rmtree(folder)  # a long row takes the disk that later steps need


def steps_of(series: Series) -> list[Step]:
    """All there is to do, the most wanted first; seconds as on an H200 host."""
    sizes, fast, disk = series.sizes, series.options.fast_folder, series.options.disk_folder
    cudnn, fa4 = sizes.recipes
    on_14 = ["--passes", "3", "--recipe", cudnn, *sizes.rows_of_14]
    device = [*sizes.shape, "--device", sizes.device]

    def one_row(length: int, recipe: str, *words: str) -> list[str]:
        return ["--batch-size", "1", "--seq-len", str(length), "--recipe", recipe, *sizes.cut, *words]

    def through(folder: str, recipe: str, passes: int = 1) -> list[str]:
        words = ["--input", f"{folder}/long_x.npy", "--output", f"{folder}/long_y.npy", "--overwrite"]
        return one_row(sizes.long, recipe, *words, "--watch", "none", "--passes", str(passes))

    def run(words: list[str], budget: str | None = None, **notes: Any) -> Callable[[str], None]:
        return lambda name: series.run(name, words, budget, **notes)

    def script(file: str, *words: str) -> Callable[[str], None]:
        return lambda name: series.script(name, file, [*words])

    def judge(*words: str) -> Callable[[str], None]:
        return lambda name: series.judge(name, [*words])

    def disk_run(name: str) -> None:
        fd = os.open(f"{disk}/long_x.npy", os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        series.run(name, through(disk, cudnn), "4GiB", place="disk")

    long, few = ["--seq-len", str(sizes.long)], ("--positions", str(sizes.positions))
    files, memory = [f"{fast}/long_x.npy", f"{disk}/long_x.npy"], {"place": "memory"}
    trace = str(series.options.output.absolute().with_suffix(".trace.json"))
    longest = one_row(sizes.longest, cudnn, "--layers", "1", "--watch", "0", "--trace", trace, "--overwrite")
    judged, whole = (one_row(length, cudnn, "--watch", "0") for length in (sizes.judged, sizes.long))
    name, chunked = f"{sizes.long:,} positions", "case 14 in chunks, 2 GiB card"
    fourth, half, all_of = f"{sizes.longest:,} positions", f"{sizes.judged:,} positions", f"{name}, judged"
    errors = ["--device", sizes.device, "--seq-len", str(sizes.chunk_error), *sizes.shape[:2]]
    errors += dict.fromkeys(sizes.recipes)
    journal = ["--folder", disk, *sizes.rows_of_14, *device, "--batch-size", str(sizes.journal_rows), "--turns"]
    journal, rates = [*journal, str(min(2, sizes.turns))], ["--gib", str(sizes.disk_gib), "--turns", str(sizes.turns)]
    return [
        Step(25, "disk", {"disk": script("long_parts.py", "disk", *files, *long, *device)}),
        Step(25, "kernel", {"cuDNN alone": script("long_parts.py", "kernel", cudnn, *long, *device)}),
        Step(24, "run", {f"{name}, 4 GiB card": run(through(fast, cudnn), "4GiB", **memory)}),
        Step(38, "kernel", {"FA4 alone": script("long_parts.py", "kernel", fa4, *long, *device)}),
        Step(42, "run", {f"{name}, 4 GiB card, FA4": run(through(fast, fa4, 2), "4GiB", **memory)}),
        Step(42, "run", {f"{name}, FA4": run(through(fast, fa4, 2), **memory)}),
        Step(24, "run", {name: run(through(fast, cudnn), **memory)}),
        Step(22, "run", {"case 14, on the fly": run(on_14)}),
        Step(26, "run", {chunked: run([*on_14, *sizes.cut], "2GiB")}),
        Step(125, "run", {fourth: run(longest, "12GiB")}),
        Step(18, "run", {half: run(judged, "4GiB")}),
        Step(80, "referee", {
            f"judged {chunked}": judge(), f"judged {half}": judge(), f"judged {fourth}": judge(*few),
            "error by chunks": script("chunk_error.py", *errors),
        }),
        Step(28, "run", {f"{name}, from and to the disk": disk_run}),
        Step(40, "journal", {"journal": script("long_parts.py", "journal", cudnn, *journal)}),
        Step(35, "read-rate", {"read rate": script("read_rate.py", "--folder", disk, *rates)}),
        Step(35, "host-memory", {"host memory": series.host_memory}),
        Step(25, "run", {all_of: run(whole, "4GiB")}),
        Step(240, "referee", {f"judged {all_of}": judge()}),
    ]  # fmt: skip


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="records go here, one a line")
    parser.add_argument("--commit", help="for a checkout without history")
    parser.add_argument("--seconds", type=float, default=400.0, help="what would not end by then is left out")
    parser.add_argument("--fast-folder", default="/dev/shm", help="where files lie in memory")
    parser.add_argument("--disk-folder", default="runs", help="where files lie on the disk, and run directories")
    parser.add_argument("--only", help="names of works, separated by `;`")
    parser.add_argument("--toy", action="store_true", help="tiny rows, on a CPU")
    options = parser.parse_args(arguments)
    series = Series(options, TOY if options.toy else Sizes())
    steps = steps_of(series)
    if options.only:
        chosen = set(options.only.split(";"))
        steps = [step._replace(works={n: w for n, w in step.works.items() if n in chosen}) for step in steps]
    try:
        series.do(steps)
    finally:
        for folder in (options.fast_folder, options.disk_folder):
            Path(folder, "long_x.npy").unlink(missing_ok=True)
    say(f"{len(series.failed)} failed: {'; '.join(series.failed) or 'none'}; records in {options.output}")
    return 1 if series.failed else 0


if __name__ == "__main__":
    sys.exit(main())
