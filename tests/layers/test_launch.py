"""Launches change how kernels reach the device, never what is computed; graphs by a stand-in for a card."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from stacks import rows_of, run_stack
from torch import Tensor

import frontier.layers.launch as launch_module
from frontier.case import Case
from frontier.errors import Unsupported
from frontier.layers.launch import LAUNCH, Graphs, eager
from frontier.layers.program import make_program
from frontier.layers.weights import seeded_state
from frontier.recipe import REFERENCE, parse_recipe

MakeCase = Callable[..., Case]
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")


def doubled(x_BSD: Tensor) -> None:
    x_BSD *= 2


def test_eager_computes_in_the_output_and_leaves_its_input() -> None:
    x, out = torch.ones(2, 3, 4), torch.zeros(2, 3, 4)
    eager(doubled)(x, out)
    assert bool((x == 1).all()) and bool((out == 2).all())
    eager(doubled)(x, x)
    assert bool((x == 2).all())


@needs_compiler
@pytest.mark.parametrize("recipe", ["fp32/packed/flash", "fp16/packed/dense/held-ffn"])
def test_a_compiled_program_equals_the_eager_one(make_case: MakeCase, recipe: str) -> None:
    case = make_case(layers=1)
    x_BSD = rows_of(case)
    program = make_program(seeded_state(case), case, parse_recipe(f"{recipe}/compile", REFERENCE), torch.device("cpu"))
    first_BSD, second_BSD = torch.full_like(x_BSD, torch.nan), torch.full_like(x_BSD, torch.nan)
    program(x_BSD, first_BSD)
    kept_BSD, given_BSD = first_BSD.clone(), x_BSD.clone()
    program(2 * x_BSD, second_BSD, torch.ones(2, 37, dtype=torch.bool))
    assert torch.equal(first_BSD, kept_BSD) and torch.equal(x_BSD, given_BSD)
    for got_BSD, scale in ((first_BSD, 1), (second_BSD, 2)):
        want_BSD = run_stack(case, recipe, scale * x_BSD)
        assert float((got_BSD - want_BSD).abs().max()) < (1e-5 if "fp32" in recipe else 4e-3)


@needs_compiler
def test_a_shape_too_many_to_compile_for_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "MOST_COMPILED", 2)
    run = LAUNCH["compile"].wrap(doubled, ())
    for length in (3, 4, 3):
        run(torch.ones(1, length, 4), torch.empty(1, length, 4))
    with pytest.raises(Unsupported, match=r"shape \[1, 5, 4\] are the 3th shape to compile for") as caught:
        run(torch.ones(1, 5, 4), torch.empty(1, 5, 4))
    assert "eager or graph" in str(caught.value.hint)
    # Another stack of the same code counts for itself.
    out = torch.empty(1, 5, 4)
    LAUNCH["compile"].wrap(doubled, ())(torch.ones(1, 5, 4), out)
    assert bool((out == 2).all())


@needs_compiler
def test_what_cannot_be_traced_is_an_error_and_not_silently_eager() -> None:
    def breaks(x_BSD: Tensor) -> None:
        x_BSD *= float(x_BSD.sum()) + len(shutil.which("true") or "")

    with pytest.raises(torch._dynamo.exc.Unsupported):
        LAUNCH["compile"].wrap(breaks, ())(torch.ones(1, 3, 4), torch.empty(1, 3, 4))


class Stream:
    """A CUDA stream's names; what waits for what is written down."""

    told: ClassVar[list[tuple[Any, Any]]] = []

    def wait_stream(self, other: "Stream") -> None:
        Stream.told.append((self, other))


class Graph:
    """Keeps what was run under capture, and runs it again."""

    alive = 0

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []
        Graph.alive += 1

    def replay(self) -> None:
        for call in self.calls:
            call()

    def reset(self) -> None:
        Graph.alive -= 1


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """torch.cuda without a card: capture records calls of `run`, replay repeats them on the same memory."""
    state: dict[str, Any] = {"capturing": None, "pools": [], "stream": Stream(), "runs": 0, "outside": False}

    @contextmanager
    def capture(graph: Graph, pool: Any, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        state["capturing"] = graph
        state["pools"].append(pool)
        yield
        state["capturing"] = None

    @contextmanager
    def entered(*given: Any) -> Iterator[None]:
        yield

    for name, value in {
        "CUDAGraph": Graph, "graph": capture, "Stream": Stream, "stream": entered, "device": entered,
        "graph_pool_handle": lambda: object(), "synchronize": lambda: None,
        "current_stream": lambda device: state["stream"], "is_current_stream_capturing": lambda: state["outside"],
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    Graph.alive, Stream.told = 0, []
    yield state


def recorded(state: dict[str, Any]) -> Callable[[Tensor], None]:
    def run(x_BSD: Tensor) -> None:
        if state["capturing"] is not None:
            state["capturing"].calls.append(lambda: x_BSD.mul_(2))
        else:
            state["runs"] += 1
            x_BSD.mul_(2)

    return run


def test_a_graph_is_warmed_up_once_and_replayed_on_each_calls_rows(stand_in: dict[str, Any]) -> None:
    graphs = Graphs(recorded(stand_in))
    outs = []
    for value in (1.0, 3.0, 5.0):
        x, out = torch.full((2, 3, 4), value), torch.full((2, 3, 4), torch.nan)
        graphs(x, out)
        assert bool((x == value).all())
        outs.append(out)
    assert [float(out[0, 0, 0]) for out in outs] == [2.0, 6.0, 10.0]  # held at once, and each call's own
    assert stand_in["runs"] == 1 and Graph.alive == 1


def test_a_capture_leaves_no_workspace_that_another_may_free(
    stand_in: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS's of the capturing stream must be made inside of the capture, in the graph's own pool, and stay there."""
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: told.append("dropped"), raising=False)
    run = recorded(stand_in)
    graphs = Graphs(lambda x_BSD: (told.append("captured" if stand_in["capturing"] else "ran"), run(x_BSD))[1])
    for _ in range(2):
        graphs(torch.ones(1, 3, 4), torch.empty(1, 3, 4))
    assert told == ["ran", "dropped", "captured", "dropped"]


def test_graphs_of_many_shapes_are_bounded_and_share_one_pool(
    stand_in: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_module, "MOST_GRAPHS", 2)
    graphs = Graphs(recorded(stand_in))
    for length in (3, 4, 3, 5, 3, 4):
        x, out = torch.ones(1, length, 4), torch.empty(1, length, 4)
        graphs(x, out)
        assert bool((out == 2).all()) and Graph.alive <= 2
    # 3 was used since 4 was, so 5 took the place of 4, which was then captured again.
    assert stand_in["runs"] == 4 and len(set(map(id, stand_in["pools"]))) == 1


def test_another_streams_call_waits_for_the_last_replay(stand_in: dict[str, Any]) -> None:
    graphs, first, second = Graphs(recorded(stand_in)), stand_in["stream"], Stream()
    x = torch.ones(1, 3, 4)
    graphs(x, torch.empty_like(x))
    Stream.told.clear()
    graphs(x, torch.empty_like(x))
    assert Stream.told == []
    stand_in["stream"] = second
    graphs(x, torch.empty_like(x))
    assert Stream.told == [(second, first)]


def test_a_callers_own_capture_takes_in_the_kernels(stand_in: dict[str, Any]) -> None:
    graphs, x = Graphs(recorded(stand_in)), torch.ones(1, 3, 4)
    out = torch.empty_like(x)
    stand_in["outside"] = True
    graphs(x, out)
    assert bool((out == 2).all()) and Graph.alive == 0
