"""A small stack, its drop-in and its baseline with the same weights."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner, Result
from stand_in import BaselineTransformer, TransformerConfig
from torch import Tensor

from frontier.adaptors.organizer import UserOptimizedTransformer, copy_model_weights
from frontier.cli import cli
from frontier.record import Record

STAND_IN = Path(__file__).with_name("stand_in.py")
TINY = """name = "tiny"\nbatch_size = 2\nseq_len = 16\nd_model = 32\nheads = 4\nffn_dim = 32\nlayers = 2\n"""

CONFIG = TransformerConfig(batch_size=3, seq_len=24, d_model=32, num_heads=4, ffn_dim=48, num_layers=2, causal=True)


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Tensors here are tiny: threads that wait for one another would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # in the processes that tests start
        yield
    torch.set_num_threads(before)


@pytest.fixture
def pair() -> SimpleNamespace:
    """`ours` and `theirs` with the same weights; `x`, an all-true mask `all_valid`, and one with holes, `holes`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        theirs, ours = BaselineTransformer(CONFIG).eval(), UserOptimizedTransformer(CONFIG).eval()
        copy_model_weights(theirs, ours)
        x = torch.randn(3, 24, 32)
    holes = torch.ones(3, 24, dtype=torch.bool)
    holes[0, :5], holes[1, 7:9], holes[2] = False, False, False
    return SimpleNamespace(ours=ours, theirs=theirs, x=x, all_valid=torch.ones(3, 24, dtype=torch.bool), holes=holes)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture
def grade(tiny: Path) -> Callable[..., tuple[Result, list[Record]]]:
    def grade(*arguments: str, script: Path = STAND_IN) -> tuple[Result, list[Record]]:
        result = CliRunner().invoke(cli, ["grade", "--script", str(script), "--cases", str(tiny), *arguments])
        return result, [Record.from_json(line) for line in result.stdout.splitlines()]

    return grade


def budget(got: Tensor, want: Tensor) -> float:
    """The largest share of the contract's rule that an element uses; below 1 passes."""
    got, want = got.detach().double(), want.detach().double()
    error = (got - want).abs()
    relative = (error / (0.02 * want.abs())).nan_to_num(nan=0.0, posinf=torch.inf)  # an exact hit of 0 is no error
    return float(torch.where(error.isfinite(), torch.minimum(error / 2e-3, relative), torch.inf).max())
