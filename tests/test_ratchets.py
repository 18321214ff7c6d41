"""What must not slip: imports go down, files stay short, every door has its sign, nothing heavy loads early."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES_PER_FILE = 300
# 5,500 held the streaming program; a gate, a tuner, a drop-in and seven kernels for in-core shapes brought 5,600,
# chunks, a journal, pipes and resume 2,000, going on inside a row 310; pinned keys, rows drawn ahead and a plain
# yardstick 200; first tokens held, even chunks, a quicker launch
# and inputs read ahead 210; projections in parts and a look at finished outputs 240;
# both turns of the one kernel in one launch 170, weights that a compiled graph is given 60,
# a trace of bounded size 20, one memory for all shapes of a stream 20,
# a canary of fused stacks and padding that spreads nothing 90, medians of graded series and damaged evidence 50.
MOST_LINES_IN_ALL = 14_880

FLOORS = (  # lowest first; rooms on one line may not import one another
    {"errors"}, {"units"}, {"spans"},
    {"case", "machine", "recipe", "ranks"},
    {"data", "layers", "stream", "judge"},
    {"ledger"}, {"planner", "candidates", "timing", "timelock"}, {"record"}, {"tuned", "fused_canary"},
    {"chooser", "rundir", "estimate"}, {"flows", "bench"}, {"runner", "proxy"}, {"gating"}, {"start", "tuner"},
    {"report", "adaptors", "grading", "exporting", "show", "options"}, {"cli_tune", "cli_gate", "cli_dropin"}, {"cli"},
)  # fmt: skip
FLOOR_OF = {room: turn for turn, rooms in enumerate(FLOORS) for room in rooms}

FRONTIER = sorted((ROOT / "frontier").rglob("*.py"))
REFEREE = sorted((ROOT / "referee").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SIGNED = [path for path in FRONTIER if path.name != "__init__.py"]
TEXTS = [
    path
    for folder in ("frontier", "referee", "tests", "configs", "scripts", "docs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".toml", ".md", ".sh", ".yml") and "__pycache__" not in path.parts
] + sorted(path for path in ROOT.glob("*") if path.suffix in (".toml", ".md"))

# Put together, so that this file may be searched like any other.
HOSTS = [
    name.replace("_", ".")
    for name in (
        "pypi_org", "pythonhosted_org", "huggingface_co", "hf_co/", "anaconda_org", "download_pytorch_org",
        "registry_npmjs", "crates_io", "proxy_golang", "ghcr_io", "docker_io", "modelscope_cn",
    )
]  # fmt: skip
MACHINE_PATHS = [f"/{top}/" for top in ("work", "tmp", "home", "root", "Users", "mnt")]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it hides; a relative one starts with a dot."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def home_of_names() -> dict[str, str]:
    """The package's own names, which stand for the rooms they come from."""
    import frontier

    return {name: module.split(".")[1] for name, module in frontier._HOME.items()}


def import_faults(source: str, room: str) -> list[str]:
    """What `source`, a file of `room`, imports that lies sideways, above, or in another house."""
    faults = []
    for line, name in imported(source):
        parts = name.split(".")
        if name.startswith("."):
            faults.append(f"line {line}: relative import {name}")
        if parts[0] == "referee" and room != "cli":
            faults.append(f"line {line}: {room} imports the referee")
        if parts[0] != "frontier" or len(parts) < 2 or parts[1].startswith("__"):
            continue
        other = parts[1] if parts[1] in FLOOR_OF else home_of_names().get(parts[1], parts[1])
        if other not in FLOOR_OF:
            faults.append(f"line {line}: {other} has no floor")
        elif other != room and FLOOR_OF[other] >= FLOOR_OF[room]:
            faults.append(f"line {line}: {room} imports {other}")
    return faults


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "frontier").parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", [p for p in FRONTIER if p != ROOT / "frontier" / "__init__.py"], ids=name_of)
def test_imports_go_down(path: Path) -> None:
    assert room_of(path) in FLOOR_OF, f"{room_of(path)} has no floor"
    assert import_faults(path.read_text(), room_of(path)) == []


def test_the_package_itself_imports_no_room() -> None:
    assert not [name for _, name in imported((ROOT / "frontier/__init__.py").read_text()) if "frontier" in name]


@pytest.mark.parametrize(
    ("source", "room", "fault"),
    [
        ("from frontier.planner import Plan", "case", "case imports planner"),
        ("import frontier.planner", "case", "case imports planner"),
        ("from frontier import planner", "stream", "stream imports planner"),
        ("from frontier import Plan", "stream", "stream imports planner"),
        ("from frontier.layers.block import forward", "stream", "stream imports layers"),
        ("from frontier.machine import Machine", "case", "case imports machine"),
        ("def f():\n    from frontier.runner import run", "flows", "line 2: flows imports runner"),
        ("if x:\n  try:\n    import frontier.cli\n  except E: pass", "report", "line 3: report imports cli"),
        ("import importlib\nimportlib.import_module('frontier.runner')", "data", "data imports runner"),
        ("__import__('frontier.runner')", "data", "data imports runner"),
        ("from .ring import Slot", "stream", "relative import .ring.Slot"),
        ("from ..planner import plan", "stream", "relative import ..planner.plan"),
        ("from . import ring", "stream", "relative import ..ring"),
        ("def f():\n    import referee", "runner", "runner imports the referee"),
        ("from referee.compare import compare", "judge", "judge imports the referee"),
        ("from frontier.utils import x", "cli", "utils has no floor"),
    ],
)
def test_an_import_that_goes_up_or_sideways_would_be_seen(source: str, room: str, fault: str) -> None:
    assert len(import_faults(source, room)) == 1
    assert import_faults(source, room)[0].endswith(fault)


@pytest.mark.parametrize(
    ("source", "room"),
    [
        ("from frontier.spans import Span\nfrom frontier.stream.ring import Slot\nimport torch", "stream"),
        ("from frontier import __version__\nfrom referee.cli import cli\nfrom frontier import run", "cli"),
        ("import frontier.errors", "units"),
    ],
)
def test_an_import_that_goes_down_is_no_fault(source: str, room: str) -> None:
    assert import_faults(source, room) == []


def frontier_imports(source: str) -> list[str]:
    return [name for _, name in imported(source) if name.split(".")[0] == "frontier"]


@pytest.mark.parametrize("path", REFEREE, ids=name_of)
def test_the_referee_never_imports_frontier(path: Path) -> None:
    assert frontier_imports(path.read_text()) == []


def test_a_referee_that_imports_frontier_would_be_seen() -> None:
    assert frontier_imports("def f():\n    from frontier.case import Case") == ["frontier.case.Case"]


def too_long(path: Path) -> bool:
    return len(path.read_text().splitlines()) > MOST_LINES_PER_FILE


@pytest.mark.parametrize("path", FRONTIER + REFEREE + TESTS, ids=name_of)
def test_no_file_is_too_long(path: Path) -> None:
    assert not too_long(path)


def test_a_file_that_is_too_long_would_be_seen(tmp_path: Path) -> None:
    for lines, seen in ((300, False), (301, True)):
        (tmp_path / "x.py").write_text("pass\n" * lines)
        assert too_long(tmp_path / "x.py") is seen


def test_frontier_is_not_too_long_in_all() -> None:
    assert sum(len(path.read_text().splitlines()) for path in FRONTIER) <= MOST_LINES_IN_ALL


def sign_faults(source: str) -> list[str]:
    """What the sign on a module's door lacks: the promise, then Takes, Gives, Knows nothing of, in this order."""
    lines = (ast.get_docstring(ast.parse(source)) or "").splitlines()
    if not lines:
        return ["no sign"]
    faults = [] if len(lines) > 1 and lines[1] == "" else ["the first line is not a promise on its own"]
    at = [next((n for n, line in enumerate(lines) if line.startswith(word)), None) for word in SIGN]
    faults += [f"no `{word.strip()}`" for word, place in zip(SIGN, at, strict=True) if place is None]
    found = [place for place in at if place is not None]
    return faults + (["out of order"] if found != sorted(found) else [])


SIGN = ("Takes    ", "Gives    ", "Knows nothing of ")


@pytest.mark.parametrize("path", SIGNED, ids=name_of)
def test_every_door_has_its_sign(path: Path) -> None:
    assert sign_faults(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import os", "no sign"),
        ('"""Slots.\n\nTakes    a.\nGives    b.\n"""', "no `Knows nothing of`"),
        ('"""Slots.\n\nGives    b.\nTakes    a.\nKnows nothing of c.\n"""', "out of order"),
        ('"""Slots\nand more.\n\nTakes    a.\nGives    b.\nKnows nothing of c.\n"""', "the first line is not"),
    ],
)
def test_a_door_without_its_sign_would_be_seen(source: str, fault: str) -> None:
    assert len(sign_faults(source)) == 1 and sign_faults(source)[0].startswith(fault)


def mentions(text: str, words: list[str]) -> list[str]:
    return [word for word in words if word in text]


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_no_source_names_a_registry_or_a_path_of_one_machine(path: Path) -> None:
    assert mentions(path.read_text(), HOSTS + MACHINE_PATHS) == []


@pytest.mark.parametrize("text", [f"x = 'https://{HOSTS[0]}/simple'", f"open('{MACHINE_PATHS[0]}x')"])
def test_a_registry_or_a_path_of_one_machine_would_be_seen(text: str) -> None:
    assert len(mentions(text, HOSTS + MACHINE_PATHS)) == 1


def loads_torch(program: str) -> bool:
    run = f"{program}\nimport sys; sys.exit(7 if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 7), done.stderr
    return done.returncode == 7


@pytest.mark.parametrize(
    ("program", "loads"),
    [
        ("import frontier, frontier.planner, frontier.record, frontier.chooser, frontier.layers.costs", False),
        ("import frontier; frontier.Case, frontier.Machine, frontier.plan, frontier.Record", False),
        ("import frontier.cli, frontier.show, frontier.estimate, frontier.report.markdown", False),
        ("import frontier.layers.block", True),
    ],
)
def test_nothing_heavy_loads_early(program: str, loads: bool) -> None:
    assert loads_torch(program) is loads


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"]])
def test_help_answers_without_torch(arguments: list[str]) -> None:
    program = f"from click.testing import CliRunner\nfrom frontier.cli import cli\nCliRunner().invoke(cli, {arguments})"
    assert not loads_torch(program)
