#!/usr/bin/env python3
"""How long a newcomer waits for the first result of each case: fresh processes, none with a compile cache.

Takes    case names (all in-core ones if none), recipes if not the chosen ones, how many processes at once.
Gives    one record of kind "first-result" a case: seconds from weights on the host to the first output, and of the
         whole process, imports included.
Knows nothing of later calls, which `frontier tune` times.

    python scripts/first_results.py --output first.jsonl --at-once 4
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONGEST_S = 300
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=[str(number) for number in range(1, 14)])
    parser.add_argument("--recipe", help="of all cases, in place of each one's choice")
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        choices=range(1, 65),
        metavar="N",
        help="processes side by side: compilers use one core each",
    )
    parser.add_argument("--caches", type=Path, help="keep what was compiled here; must be empty or missing")
    parser.add_argument("--output", type=Path, help="records go here, one a line, behind those there")
    parser.add_argument("--commit", help="for a checkout without history")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(first_call(given.child, given.recipe)))
        return 0
    if given.output is None or given.output.is_dir() or not given.output.parent.is_dir():
        parser.error("name a file in a folder that exists with --output")
    if unknown := [name for name in given.cases if not (ROOT / "configs/cases" / f"{name}.toml").is_file()]:
        parser.error(f"no case `{unknown[0]}`: name shipped ones, such as 1 or 13")
    if given.caches and given.caches.is_dir() and any(given.caches.iterdir()):
        parser.error(f"{given.caches} is not empty: a first result from a filled cache tells nothing")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.at_once) as pool:
        caches = given.caches or Path(folder)
        started = {pool.submit(in_a_process, case, given, caches): case for case in given.cases}
        return max([keep(started[ended], ended.result(), given) for ended in as_completed(started)])


def in_a_process(case: str, given: argparse.Namespace, caches: Path) -> dict[str, object]:
    """What a process of its own says of a case, and its seconds; `failed` if it said nothing."""
    command = [sys.executable, __file__, "--child", case, *(["--recipe", given.recipe] if given.recipe else [])]
    # A folder a case: what one compiles, another does not find.
    places = {name: str(caches / f"{name}-{case}") for name in CACHES}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    began_s = time.perf_counter()
    env = {**os.environ, **places, "PYTHONPATH": path}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        return {"failed": f"no result after {LONGEST_S} s", "process_s": LONGEST_S}
    seconds = time.perf_counter() - began_s
    lines = done.stdout.splitlines()
    told = json.loads(lines[-1]) if done.returncode == 0 and lines else {"failed": done.stderr.strip()[-300:]}
    return told | {"process_s": round(seconds, 2)}


def keep(case: str, found: dict[str, object], given: argparse.Namespace) -> int:
    """Write the record of one case, failed ones too; 1 if it failed."""
    from frontier.case import Case
    from frontier.machine import Machine
    from frontier.record import Record
    from frontier.runner import facts_of_now

    facts = facts_of_now(Machine.detect("auto"))
    facts |= {"commit": given.commit or facts["commit"]}
    failed = found.get("failed")
    record = Record(
        kind="first-result",
        **facts,
        case=Case.load(case).as_dict(),
        recipe=str(found.get("recipe", given.recipe)),
        first_result_s=None if failed else float(str(found["first_result_s"])),
        refused=None if failed is None else str(failed),
        notes={"process_s": found["process_s"], "at_once": given.at_once},
    )
    with given.output.open("a") as file:
        file.write(record.to_json() + "\n")
    print(f"case {case}: {record.recipe}: {failed or found}", flush=True)
    return int(failed is not None)


def first_call(name: str, words: str | None) -> dict[str, object]:
    """Build the program of a case and call it once, as a tuner does for a recipe's first result."""
    import torch

    from frontier.case import Case
    from frontier.chooser import choose
    from frontier.layers.program import make_program
    from frontier.layers.weights import seeded_state
    from frontier.machine import Machine
    from frontier.recipe import REFERENCE, parse_recipe

    case, machine = Case.load(name), Machine.detect("auto")
    recipe = parse_recipe(words, REFERENCE) if words else choose(case, machine, passes=float("inf")).recipe
    device, state = torch.device(machine.device), seeded_state(case)
    x_BSD = torch.randn(case.batch_size, case.seq_len, case.d_model, device=device)
    with torch.inference_mode():
        float(x_BSD[0, 0, 0])  # the device has started
        began_s = time.perf_counter()
        out_BSD = torch.empty_like(x_BSD)
        make_program(state, case, recipe, device)(x_BSD, out_BSD)
        float(out_BSD[0, 0, 0])  # waits for it
        return {"recipe": str(recipe), "first_result_s": round(time.perf_counter() - began_s, 3)}


if __name__ == "__main__":
    raise SystemExit(main())
