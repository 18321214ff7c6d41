"""The exported file is the drop-in: without frontier, with nothing but torch, the same grades and the same bits."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from frontier.cli import cli
from frontier.exporting import exported

STAND_IN = Path(__file__).with_name("stand_in.py")
SIZES = "--batch-size 2 --seq-len 16 --d-model 32 --heads 4 --ffn-dim 32 --layers 2 --causal --accuracy-trials 2"

# A machine with torch and nothing else of what frontier asks for: an import of anything else is an error.
BARE = """
import sys
class Bare:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("psutil", "safetensors", "click", "tqdm", "frontier") and not allowed(name):
            raise ModuleNotFoundError(f"no {name} on this machine", name=name)
def allowed(name):
    return name.partition(".")[0] == "frontier" and any("frontier-" in entry for entry in sys.path + FOLDERS())
def FOLDERS():
    return list(sys.modules["frontier"].__path__) if "frontier" in sys.modules else []
sys.meta_path.insert(0, Bare())
"""
DIGEST_OF_OUTPUT = """
import hashlib, sys, types, torch
torch.set_num_threads(1)
config = types.SimpleNamespace(
    batch_size=2, seq_len=16, d_model=32, num_heads=4, ffn_dim=48, num_layers=2, causal=True
)
torch.manual_seed(3)
model = UserOptimizedTransformer(config)
with torch.inference_mode():
    y = model(torch.randn(2, 16, 32), torch.ones(2, 16, dtype=torch.bool))
print(hashlib.sha256(y.numpy().tobytes()).hexdigest(), model.ran_last, sys.modules["frontier"].__file__)
"""


@pytest.fixture(scope="module")
def drop_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "carried.py"
    result = CliRunner().invoke(cli, ["export", "-o", str(path)])
    assert result.exit_code == 0, result.output
    return path


def python(program: str, folder: Path, *, bare: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a program in the folder, in a process that sees no frontier but a carried one."""
    return subprocess.run(
        [sys.executable, "-c", (BARE if bare else "") + program],
        capture_output=True, text=True, cwd=folder, env={"TMPDIR": str(folder)},
    )  # fmt: skip


def test_the_carried_class_gives_the_installed_ones_bits(drop_in: Path) -> None:
    carried = python(
        "from carried import UserOptimizedTransformer, copy_model_weights" + DIGEST_OF_OUTPUT, drop_in.parent
    )
    assert carried.returncode == 0, carried.stderr
    installed = python(
        f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})\n"
        "from frontier.adaptors.organizer import UserOptimizedTransformer" + DIGEST_OF_OUTPUT,
        drop_in.parent,
        bare=False,
    )
    assert installed.returncode == 0, installed.stderr
    assert carried.stdout.split()[:2] == installed.stdout.split()[:2] and "plain" not in carried.stdout
    assert str(drop_in.parent / "frontier-") in carried.stdout
    assert not list(drop_in.parent.glob("frontier-*")), "the folder outlived the process"


def test_the_bare_machine_of_these_tests_is_bare(tmp_path: Path) -> None:
    assert "no psutil on this machine" in python("import psutil", tmp_path).stderr
    assert "no frontier on this machine" in python("import frontier.adaptors.organizer", tmp_path).stderr


def test_the_carried_class_is_graded_as_the_installed_one(drop_in: Path) -> None:
    records = []
    case = drop_in.with_name("tiny.toml")
    case.write_text('name="t"\nbatch_size=2\nseq_len=16\nd_model=32\nheads=4\nffn_dim=32\nlayers=2\n')
    for more in ([], ["--drop-in", str(drop_in)]):
        arguments = ["grade", "--script", str(STAND_IN), "--cases", str(case), *more, "--", "--padding-ratio", "0.5"]
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, result.output
        records.append(json.loads(result.stdout))
    installed, carried = records
    assert carried["verdicts"] == installed["verdicts"] and carried["notes"]["trials"] == installed["notes"]["trials"]
    assert carried["recipe"] == installed["recipe"] and carried["notes"]["drop_in"] == "carried.py"


def test_the_file_runs_the_script_by_itself(drop_in: Path) -> None:
    run: Any = [sys.executable, "carried.py", "--facts", "facts.json", str(STAND_IN), *SIZES.split()]
    done = subprocess.run(run, capture_output=True, text=True, cwd=drop_in.parent)
    assert done.returncode == 0 and "summary: PASS" in done.stdout, done.stderr
    assert json.loads(drop_in.with_name("facts.json").read_text())["ran_last"] == "fp32/packed/flash"


def test_a_kernels_source_can_be_read(drop_in: Path) -> None:
    program = "import carried, inspect, frontier.layers.short_triton as t; print('tl.dot' in inspect.getsource(t))"
    done = python(program, drop_in.parent)
    assert done.stdout == "True\n", done.stderr


def test_imported_under_two_names_it_is_one_package(drop_in: Path) -> None:
    drop_in.with_name("again.py").write_text(drop_in.read_text())
    program = "import carried, again; print(carried.UserOptimizedTransformer is again.UserOptimizedTransformer)"
    assert python(program, drop_in.parent).stdout == "True\n"


def test_beside_another_frontier_it_is_refused(drop_in: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    done = python(
        f"import sys; sys.path.append({str(root)!r}); import frontier; import carried", drop_in.parent, bare=False
    )
    assert "ImportError: another frontier is imported already" in done.stderr


def test_the_same_source_gives_the_same_file() -> None:
    assert exported("x") == exported("x")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a-b.py", "`a-b.py` cannot be imported"),
        ("x.txt", "`x.txt` cannot be imported"),
        ("class.py", "`class.py` cannot be imported"),
        *[(f"{name}.py", f"`{name}.py` would hide a module") for name in ("frontier", "torch", "zipfile", "numpy")],
        ("nowhere/x.py", "no folder"),
        ("folder.py", "is a folder"),
    ],
)
def test_a_name_that_cannot_work_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "folder.py").mkdir()
    result = CliRunner().invoke(cli, ["export", "-o", str(tmp_path / name), "--overwrite"])
    assert result.exit_code == 2 and reason in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["folder.py"]


def test_a_file_is_replaced_only_when_asked(drop_in: Path) -> None:
    assert "is there already\nhint: add --overwrite" in CliRunner().invoke(cli, ["export", "-o", str(drop_in)]).stderr
    assert CliRunner().invoke(cli, ["export", "-o", str(drop_in), "--overwrite"]).exit_code == 0


def test_a_replacement_that_fails_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.py"
    path.write_text("old")

    def full(self: Path, text: str) -> int:
        with self.open("w") as file:
            file.write(text[:1000])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    result = CliRunner().invoke(cli, ["export", "-o", str(path), "--overwrite"])
    assert result.exit_code == 2 and "cannot be written: No space left on device" in result.stderr
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_killed_processs_folder_is_removed_by_the_next_start_and_a_living_ones_is_not(drop_in: Path) -> None:
    folder = drop_in.parent
    python("import carried, os; os.kill(os.getpid(), 9)", folder)
    assert len(left := list(folder.glob("frontier-*"))) == 1
    waits = [sys.executable, "-c", "import carried; print('up', flush=True); input(); carried._launch"]
    environment = {"TMPDIR": str(folder)}
    with subprocess.Popen(
        waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment
    ) as living:
        assert living.stdout is not None and living.stdout.readline() == "up\n"
        of_the_living = list(folder.glob("frontier-*"))
        assert len(of_the_living) == 1 and of_the_living != left
        (folder / "frontier-notes").mkdir()  # somebody else's
        assert python("import carried", folder).returncode == 0
        assert sorted(folder.glob("frontier-*")) == sorted([*of_the_living, folder / "frontier-notes"])
        _, _ = living.communicate("\n")
    (folder / "frontier-notes").rmdir()
    assert living.returncode == 0 and not list(folder.glob("frontier-*"))


def test_the_exported_file_says_when_the_script_is_none(tmp_path: Path) -> None:
    (tmp_path / "carried.py").write_text(exported("carried"))
    done = subprocess.run([sys.executable, "carried.py", "nope.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "no file `nope.py`: name the benchmark script" in done.stderr
