"""Runs the tests of Triton kernels in a process of their own, whose Triton is its interpreter from the start."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_*.py")))
def test_the_kernels_pass_their_tests_under_the_interpreter(name: str) -> None:
    triton, numpy = pytest.importorskip("triton"), pytest.importorskip("numpy")
    if version(triton.__version__) < (3, 9) and version(numpy.__version__) >= (2, 4):
        pytest.skip("before 3.9 Triton's interpreter converts arrays in a way that NumPy 2.4 forbids")
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / name)]
    done = subprocess.run(run, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    told = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join(told[-60:])
    assert re.search(r"\b\d+ passed", told[-1]) and "skipped" not in told[-1], told[-1]
