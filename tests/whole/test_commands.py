"""What the command line offers: commands, flags, help; cases and plans."""

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from commandline import assert_refused, flags, frontier

from frontier.cli import cli

COMMANDS = (
    "cases",
    "machine",
    "plan",
    "run",
    "referee",
    "proxy",
    "report",
    "gate",
    "tune",
    "choose",
    "grade",
    "export",
)
SHAPE = "--batch-size --seq-len --d-model --heads --ffn-dim --layers --causal --no-causal --seed --input-scale"
BUDGETS = "--device --device-budget --pinned-budget --host-budget"
PLANS = "--recipe --ring-depth --resident --on-the-fly --output --watch"
FLAGS = {
    "cases": f"{BUDGETS} --json",
    "machine": f"{BUDGETS} --json",
    "plan": f"--case {SHAPE} {BUDGETS} {PLANS} --json",
    "run": f"--case {SHAPE} {BUDGETS} {PLANS} --input --weights --mask --passes --run-dir --overwrite --trace --json "
    "--quiet --poison --allow-nonfinite",
    "proxy": f"--case {SHAPE} {BUDGETS} --seeds --json --quiet",
    "report": "--check",
    "gate": f"--case {SHAPE} {BUDGETS} --recipe --trials --seeds --input-scales --padding --json --quiet",
    "tune": f"--case {BUDGETS} --recipes --without --rounds --trials --seeds --finalists --output --again --json",
    "choose": f"--case {BUDGETS} --machine --passes --json",
    "grade": "--script --cases --output",
    "export": "--output --overwrite",
}
TOML = """
name = "mine"
batch_size = 2
seq_len = 30
d_model = 16
heads = 2
ffn_dim = 8
layers = 1
"""


def test_the_help_lists_every_command_and_all_exit_codes() -> None:
    done = frontier("--help")
    assert done.exit_code == 0
    assert set(COMMANDS) == set(cli.commands)
    for word in (*COMMANDS, "2 bad input", "3 does not fit", "130 stopped"):
        assert word in done.stdout


def test_help_and_version_import_neither_torch_nor_numpy() -> None:
    program = """
import sys
from frontier.cli import cli
for words in (["--help"], ["run", "--help"], ["--version"]):
    cli(words, standalone_mode=False)
loaded = {"torch", "numpy", "safetensors", "tqdm"} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    done = frontier(command, "--help")
    assert done.exit_code == 0
    assert "Usage: frontier" in done.stdout and len(done.stdout.splitlines()) > 4


@pytest.mark.parametrize("command", FLAGS)
def test_every_flag_exists_and_says_what_it_is(command: str) -> None:
    options = [p for p in cli.commands[command].params if isinstance(p, click.Option)]
    offered = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
    assert not set(FLAGS[command].split()) - offered


@pytest.mark.parametrize("command", FLAGS)
def test_every_flag_has_a_help_text(command: str) -> None:
    options = [p for p in cli.commands[command].params if isinstance(p, click.Option)]
    bare = [option.opts[0] for option in options if not option.help]
    assert not bare, f"{command}: no help for {', '.join(bare)}"


def test_cases_shows_the_fourteen_of_the_contract() -> None:
    done = frontier("cases", "--device", "cpu")
    assert done.exit_code == 0
    shown = [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("case ")]
    assert shown == [f"case {number}" for number in range(1, 15)]
    assert "needs 18.63 TiB of scores" in done.stdout


def test_cases_as_json_gives_a_line_a_case_with_the_sums_of_the_contract() -> None:
    done = frontier("cases", "--device", "cpu", "--json")
    assert done.stderr == ""
    facts = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(facts) == 14
    last = facts[-1]
    assert last["flops"] == pytest.approx(1.391e15, rel=1e-3)
    assert last["input_bytes"] == last["output_bytes"] == 13_107_200_000
    assert last["dense_scores_bytes"] == pytest.approx(20.5e12, rel=1e-3)
    assert [f["fits"] for f in facts[:13]] == [True] * 13


def test_cases_takes_names_and_paths_of_a_users_own(folder: Path) -> None:
    Path("mine é.toml").write_text(TOML)
    done = frontier("cases", "--device", "cpu", "3", "mine é.toml")
    assert done.exit_code == 0
    assert "case 3:" in done.stdout and "case mine: 2 rows x 30 positions x 16 wide" in done.stdout


def test_cases_says_what_does_not_fit_and_goes_on() -> None:
    done = frontier("cases", "--device", "cpu", "--host-budget", "700MiB")
    assert done.exit_code == 0
    assert "does not fit here" in done.stdout
    assert done.stdout.count("\ncase ") == 13


def test_machine_gives_a_reason_with_every_refusal() -> None:
    done = frontier("machine", "--device", "cpu", "--case", "2", "--json")
    assert done.exit_code == 0 and done.stderr == ""
    found = json.loads(done.stdout)
    assert found["attention"]["dense"] is None and found["attention"]["flash"] is None
    assert "card" in found["attention"]["cudnn"]
    assert "passes its canary" in frontier("machine", "--device", "cpu", "--case", "2").stdout


def test_a_plan_that_fits_shows_ledger_budget_and_time() -> None:
    done = frontier("plan", "--device", "cpu", *flags())
    assert done.exit_code == 0 and done.stderr == ""
    for word in ("recipe fp32/packed/flash", "slices of 2 rows", "weights", "total", "budget", "time   about"):
        assert word in done.stdout


def test_a_plan_as_json_is_one_line() -> None:
    done = frontier("plan", "--device", "cpu", *flags(), "--json", "--output", "y.npy")
    planned = json.loads(done.stdout)
    assert done.stderr == "" and len(done.stdout.splitlines()) == 1
    assert planned["num_slices"] == 3 and planned["slice_rows"] == 2
    assert planned["planned_bytes"]["disk"] == 5 * 150 * 64 * 4
    assert sum(e["num_bytes"] for e in planned["ledger"]) == sum(planned["planned_bytes"].values())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--device-budget", "100KiB"], ["on the card", "the budget is 100.00 KiB", "--device-budget"]),
        (["--pinned-budget", "10KiB"], ["pinned", "the budget is 10.00 KiB", "--pinned-budget"]),
        (["--host-budget", "100MiB"], ["in host memory", "the budget is 100.00 MiB", "--host-budget"]),
        (["--batch-size", "1000000000000", "--output", "y.npy"], ["on disk", "the budget is", "--output"]),
        (["--batch-size", "1000000000000", "--output", "memory"], ["in host memory", "--output none or a file"]),
        (["--batch-size", "1000000000000", "--resident"], ["in host memory", "--on-the-fly"]),
        (["--d-model", "65536"], ["in host memory", "weights"]),
        (["--seq-len", "1000000000", "--flow", "whole"], ["kernels address 2,147,483,647", "shorten --seq-len"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_plan_that_does_not_fit_gives_both_values_and_a_hint(words: list[str], says: list[str]) -> None:
    done = frontier("plan", "--device", "cpu", *flags(), *words)
    assert_refused(done, 3, *says)
    assert not list(Path().iterdir())


def test_a_refusal_for_host_memory_lists_all_that_it_sums() -> None:
    done = frontier("plan", "--device", "cpu", "--case", "14", "--host-budget", "2GiB", "--flow", "whole")
    assert_refused(done, 3, "in host memory")
    # Without a card its slots and workspace lie in host memory too, and most of the sum is theirs.
    assert "packed q, k, v" in done.stderr or "workspace" in done.stderr


def test_sizes_without_bounds_are_refused_and_not_tried() -> None:
    done = frontier("plan", "--device", "cpu", *flags(d_model=40_000_000, heads=1, seq_len=10_000))
    assert_refused(done, 3)


def test_a_plan_of_case_14_holds_none_of_it() -> None:
    program = """
from pathlib import Path
from frontier.cli import cli
cli(["plan", "--device", "cpu", "--host-budget", "40GiB", "--device-budget", "10GiB", "--resident"],
    standalone_mode=False)
print(*(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "12.21 GiB" in done.stdout
    peak_kib = int(done.stdout.split("VmHWM:")[1].split()[0])
    assert peak_kib < 700 << 10  # torch alone is 0.25 GiB


def test_the_usage_of_the_referee_is_a_command_that_works() -> None:
    done = frontier("referee")
    assert done.exit_code == 2 and "Usage: frontier referee [OPTIONS] RUN_DIR" in done.stderr
