"""A file of twice the host budget goes through a memory cgroup of that budget; what holds more is killed there."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

GIB = 1 << 30
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "host_memory.py"
# Python, torch and libraries alone are planned at 0.6 GiB on a CPU.
BUDGET = ["--host-budget", "640MiB"]


@pytest.fixture(scope="module")
def script(script_of: Callable[[str], ModuleType]) -> ModuleType:
    return script_of("host_memory")


@pytest.fixture
def can_limit(script: ModuleType, tmp_path: Path) -> None:
    """Skips, with its reason, where this test cannot be."""
    try:
        with script.limited(script.own_cgroup(), GIB):
            pass
    except script.NoCgroup as reason:
        pytest.skip(f"no memory cgroup: {reason}")
    if shutil.disk_usage(tmp_path).free < 8 * GIB:
        pytest.skip("less than 8 GiB of disk are free")


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("can_limit")
def test_a_file_twice_the_budget_streams_through_a_cgroup_of_the_budget(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--folder", str(tmp_path), *BUDGET, "--times", "2", "--", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["input_bytes"] > 2 * found["budget_bytes"]
    assert found["peak_rss_bytes"] <= found["planned_bytes"] <= found["budget_bytes"]
    assert (found["kills"], found["control_exit_code"]) == (0, -9)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("can_limit")
def test_a_run_that_would_hold_its_whole_input_does_not_pass(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--folder", str(tmp_path), *BUDGET, "--times", "1"]
    assert script.main([*options, "--", "--device", "cpu", "--resident"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["held"], found["exit_code"]) == (False, 3)


@pytest.mark.parametrize(
    ("name", "said"), [("nowhere", "No such file or directory"), ("", "does not hand its memory controller down")]
)
def test_where_no_cgroup_can_be_made_the_reason_is_said(
    name: str, said: str, script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--folder", str(tmp_path / "files"), "--cgroup", str(tmp_path / name)]) == 3
    stderr = capsys.readouterr().err
    assert said in stderr and "\nhint: " in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["files"]
    assert list((tmp_path / "files").iterdir()) == []
