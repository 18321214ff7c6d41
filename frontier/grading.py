"""Runs the public benchmark script over cases, a fresh process each, and keeps what it said.

Takes    the script's path, cases, options for the script, perhaps a file to take the drop-in from.
Gives    a record a case: the script's own verdict, times and speedup, or the reason why there are none.
Knows nothing of the drop-in's inside; nothing of the script but its options and the lines that it prints.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any

import psutil

from frontier.case import OFFICIAL_ATOL, OFFICIAL_RTOL, Case, shipped_names
from frontier.errors import CaseError, DataError
from frontier.machine import Machine
from frontier.record import PACKAGE, Record, commit, source_sha256, versions
from frontier.timelock import timing_window

LAUNCHER = PACKAGE / "adaptors" / "launch.py"

# The script's option, and its configuration's name, for each of a case's sizes.
SIZES = {
    "batch_size": ("--batch-size", "batch_size"),
    "seq_len": ("--seq-len", "seq_len"),
    "d_model": ("--d-model", "d_model"),
    "heads": ("--heads", "num_heads"),
    "ffn_dim": ("--ffn-dim", "ffn_dim"),
    "layers": ("--layers", "num_layers"),
}

_NUMBER = r"([-+.\w]+)"
_SUMMARY = re.compile(rf"^summary: (PASS|FAIL) \| max_abs={_NUMBER} \| max_rel={_NUMBER} \| failed=(\d+)/(\d+)", re.M)
_TRIAL = re.compile(rf"^trial +(\d+)/\d+: (PASS|FAIL) \| max_abs={_NUMBER}", re.M)
_TIMES = re.compile(
    rf"^(baseline|optimized) *: median={_NUMBER} ms \| mean={_NUMBER} ms \| p90={_NUMBER} ms \| min={_NUMBER} ms", re.M
)
_SPEEDUP = re.compile(rf"^speedup *: {_NUMBER}x", re.M)
_RULE = re.compile(rf"^criterion: abs_error <= {_NUMBER} OR relative_error <= {_NUMBER}%", re.M)
_CONFIG = re.compile(r"^TransformerConfig\((.*)\)$", re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grader:
    """One script with one set of options, ready for any case.

    Raises   DataError if the script or the file with the drop-in is none.
    """

    script: Path
    options: tuple[str, ...] = ()
    drop_in: Path | None = None
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        for path, use in ((self.script, "--script"), (self.drop_in, "--drop-in")):
            if path is not None and (path.suffix != ".py" or not path.is_file()):
                what = f"`{path}` is no Python file" if path.is_file() else f"no file `{path}`"
                raise DataError(what, hint=f"give {use} a file that ends in .py")
        if not self.timeout_s > 0:  # nor what is no number
            raise DataError(f"a case cannot be given {self.timeout_s:g} s", hint="give --timeout some seconds")

    def records(self, cases: Sequence[Case], commit_name: str | None = None) -> Iterator[Record]:
        """Grade each case; nobody else may time or compute on the device meanwhile.

        `commit_name` is what the records name where the checkout has no history.

        Raises   InUse if somebody does.
        """
        machine = Machine.detect(_given(self.options, "--device", "auto"))
        facts = {
            "machine": machine.name,
            "versions": versions() | ({"driver": machine.driver} if machine.driver else {}),
            "commit": commit_name or commit(),
            "source_sha256": source_sha256(),
        }
        with timing_window(machine):
            for case in cases:
                yield self._grade(case, facts)

    def _grade(self, case: Case, facts: dict[str, Any]) -> Record:
        options = [word for key, (flag, _) in SIZES.items() for word in (flag, str(getattr(case, key)))]
        options += ["--causal"] if case.causal else []
        options += ["--seed", str(case.seed), *self.options]
        started = datetime.now(UTC).isoformat(timespec="seconds")
        with tempfile.TemporaryDirectory() as folder:
            facts_path = Path(folder) / "facts.json"
            drop_in = ["--drop-in", str(self.drop_in)] if self.drop_in else []
            launch = [sys.executable, str(LAUNCHER), *drop_in, "--facts", str(facts_path)]
            code, said, talk = _run([*launch, str(self.script), *options], self.timeout_s, Path(folder))
            ran = _facts(facts_path)
        found = parse(said)
        reason = why_not_passed(case, found, code, said, talk) or why_not_ours(ran)
        rule = rule_of(options, said)
        verdict = verdict_of(reason, rule)
        summary = found.pop("summary", None)
        found.pop("config", None)
        seed, scale = (_given(options, flag, "1") for flag in ("--seed", "--input-scale"))
        drawn = {"seed": int(seed), "input_scale": float(scale)} if summary else {}  # numbers, once the script ran
        return Record(
            kind="grade",
            **facts,
            case=case.as_dict() | drawn,
            recipe=ran.get("ran_last") or "none",
            command=shlex.join(["python", self.script.name, *options]),
            started=started,
            input="the script's",
            flops=case.flops,
            device_allocated_peak_bytes=ran.get("peak_bytes"),
            verdicts={"script": {"verdict": verdict, "rule": say_rule(rule), **(summary or {})}},
            refused=reason if summary is None else None,
            notes={
                **found,
                "options": shlex.join(self.options),
                "exit_code": code,
                "script_sha256": hashlib.sha256(self.script.read_bytes()).hexdigest()[:16],
                "drop_in": self.drop_in.name if self.drop_in else None,
                "runs": ran.get("runs", {}),
                "reason": reason or (None if verdict == "pass" else say_rule(rule)),
            },
        )


def cases_of(text: str) -> list[Case]:
    """The cases that `1-13`, `2,6` or paths of TOML files name, in that order.

    Raises   CaseError if a part names none.
    """
    found, shipped = [], shipped_names()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if dash and first.isdecimal() and last.isdecimal():
            if not {first, last} <= set(shipped) or int(first) > int(last):
                raise CaseError(f"no cases `{part}`", hint=f"shipped cases are {', '.join(shipped)}")
            found += [Case.load(str(number)) for number in range(int(first), int(last) + 1)]
        else:
            found.append(Case.load(part.strip()))
    return found


def rule_of(options: Sequence[str], said: str = "") -> tuple[float, float]:
    """atol and rtol that the script said it judged by, else what these options name; NaN for what is no number."""
    told = _RULE.search(said)
    given = (_given(options, "--atol", str(OFFICIAL_ATOL)), _given(options, "--rtol", str(OFFICIAL_RTOL)))
    texts = told.groups() if told else given
    atol, rtol = (math.nan if (number := _finite(text)) is None else number for text in texts)
    return atol, rtol / 100 if told else rtol  # the script says it in percent


def say_rule(rule: tuple[float, float]) -> str:
    """The rule in words, for records and people."""
    if rule == (OFFICIAL_ATOL, OFFICIAL_RTOL):
        return "official"
    return f"atol {rule[0]:g}, rtol {rule[1]:g}, NOT the official rule"


def verdict_of(reason: str | None, rule: tuple[float, float]) -> str:
    """`pass` only by the official rule or one that is nowhere looser; what another rule passes is named so."""
    if reason:
        return "fail"
    return "pass" if rule[0] <= OFFICIAL_ATOL and rule[1] <= OFFICIAL_RTOL else "pass by a looser rule"


def sentence(record: Record) -> str:
    """One line: case, verdict, times and speedup by the script, what ran; or the reason."""
    verdict, notes = record.verdicts["script"], record.notes
    if verdict["verdict"] == "fail":
        return f"case {record.case['name']}: fail, {notes['reason']}"
    rule = "" if verdict["rule"] == "official" else f" ({verdict['rule']})"
    return (
        f"case {record.case['name']}: {verdict['verdict']}{rule}, largest error {verdict['largest_error']:.2g}; "
        f"{notes['baseline_ms']['p50']:.4f} -> {notes['optimized_ms']['p50']:.4f} ms, {notes['speedup']:.2f} x; "
        f"ran {record.recipe}"
    )


def parse(said: str) -> dict[str, Any]:
    """What the script printed: configuration, summary, trials, times in ms, speedup; what is missing is left out."""
    found: dict[str, Any] = {}
    if config := _CONFIG.search(said):
        found["config"] = dict(part.split("=", 1) for part in config[1].split(", "))
    if summary := _SUMMARY.search(said):
        word, largest, relative, failing, elements = summary.groups()
        found["summary"] = {
            "said": word, "largest_error": _finite(largest), "largest_relative_error": _finite(relative),
            "failing": int(failing), "elements": int(elements),
        }  # fmt: skip
    if trials := _TRIAL.findall(said):
        found["trials"] = [{"said": word, "largest_error": _finite(largest)} for _, word, largest in trials]
    for name, *times in _TIMES.findall(said):
        found[f"{name}_ms"] = dict(zip(("p50", "mean", "p90", "least"), map(_finite, times), strict=True))
    if speedup := _SPEEDUP.search(said):
        found["speedup"] = _finite(speedup[1])
    return found


def why_not_passed(case: Case, found: dict[str, Any], code: int | None, said: str, talk: str) -> str | None:
    """The reason why this run does not count as passed, or None; `code` is None where it was ended by us."""
    last = next((line.strip() for text in (talk, said) for line in reversed(text.splitlines()) if line.strip()), "")
    summary = found.get("summary", {})
    if code is not None and code < 0:
        name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
        return f"killed by {name}: {last}"[:300]
    if summary.get("said") == "FAIL":
        return f"{summary['failing']} of {summary['elements']} elements fail"
    if code is None:
        return last
    if code or not summary:
        return f"exit code {code}: {last}"[:300]
    ran = found.get("config", {})
    wanted = {name: str(getattr(case, key)) for key, (_, name) in SIZES.items()} | {"causal": str(case.causal)}
    other = [f"{name}={ran.get(name)}, not {value}" for name, value in wanted.items() if ran.get(name) != value]
    if other:
        return f"the script ran another case: {'; '.join(other)}"
    if not summary["elements"]:
        return "the script compared nothing"
    if summary["largest_error"] is None:
        return "the script's largest error is no number"
    times = [found.get(f"{name}_ms", {}).get("p50") for name in ("baseline", "optimized")]
    return None if found.get("speedup") and all(times) else "the script printed no times or no speedup"


def why_not_ours(ran: dict[str, Any]) -> str | None:
    """Why these facts of the launcher do not show that the drop-in computed anything, or None."""
    if not sum(ran.get("runs", {}).values()):
        return "the drop-in never ran: the script took its class from elsewhere, or the class did not count its `runs`"
    return None


def _facts(path: Path) -> dict[str, Any]:
    """What the launcher wrote; nothing where it was killed before or while it did."""
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return facts


def _run(command: list[str], timeout_s: float, folder: Path) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr of a command in a session of its own; the code is None if it ran too long."""
    # A script in another's process would inherit allocator and kernels of the case before: 11-18 % on cases 8 and 13
    # after case 6 (seen by a peer). Files, not pipes: a pipe has no end while whatever the script started holds it.
    paths = folder / "stdout", folder / "stderr"
    with paths[0].open("wb") as said, paths[1].open("wb") as talk:
        run = subprocess.Popen(command, stdout=said, stderr=talk, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            code, ended = run.wait(timeout_s), ""
        except subprocess.TimeoutExpired:
            _end(run)
            code, ended = None, f"\nit ran past {timeout_s:g} s and was ended"
        except BaseException:
            _end(run)
            raise
    out, err = (path.read_text(encoding="utf-8", errors="replace") for path in paths)
    return code, out, err + ended


def _end(run: subprocess.Popen[bytes]) -> None:
    """Kill a process, its group, and descendants that made groups or sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(run.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    run.wait()


def _given(options: Sequence[str], name: str, usual: str) -> str:
    """The last value of an option, as argparse takes it: --at for --atol too."""
    for word, following in zip_longest(options, options[1:], fillvalue=""):
        given, equals, value = word.partition("=")
        if len(given) > 3 and name.startswith(given):
            usual = value if equals else following
    return usual


def _finite(text: str) -> float | None:
    """The number, or None for one that JSON does not know."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
