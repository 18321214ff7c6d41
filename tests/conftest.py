"""For all tests: no deadline on a Hypothesis example, since a busy machine is no fault of the code."""

import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import settings

from frontier import timelock

settings.register_profile("frontier", deadline=None)
settings.load_profile("frontier")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Where tensors are tiny, threads that wait for one another would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def script_of() -> Callable[[str], ModuleType]:
    """A program of `scripts/` as a module, by its name."""

    def load(name: str) -> ModuleType:
        path = Path(__file__).resolve().parents[1] / "scripts" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def mount_small_disk() -> Iterator[Callable[[Path, str], Path]]:
    """Makes a folder a filesystem of a size such as 64k, until the test ends; skips where none can be mounted."""
    with ExitStack() as undo:

        def mount(disk: Path, size: str) -> Path:
            disk.mkdir()
            command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(disk)]
            mounted = subprocess.run(command, capture_output=True, text=True)
            if mounted.returncode:
                pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
            undo.callback(subprocess.run, ["umount", "-l", disk], check=True)
            return disk

        yield mount


@pytest.fixture(scope="session")
def locks_folder() -> Iterator[Path]:
    """As open as the temp folder itself: some tests run as another user."""
    with tempfile.TemporaryDirectory(prefix="frontier-locks-") as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


@pytest.fixture(autouse=True)
def own_locks(request: pytest.FixtureRequest, locks_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two test runs on one CPU do not lock each other out; a card is locked for real."""
    if request.node.get_closest_marker("card") is None:
        monkeypatch.setattr(timelock, "folder", lambda: locks_folder)
