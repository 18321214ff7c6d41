"""Bad input gets one clear sentence, a hint and an exit code; nothing is lost or left half-valid (issue section 5)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from commandline import SIZES, assert_nothing_left, assert_refused, frontier, small_case, try_run
from safetensors.numpy import save_file

from frontier.layers.weights import expected_shapes

ROWS = (5, 150, 64)


class Fault(NamedTuple):
    """What is made, what is typed after `frontier run`, and what must be said."""

    name: str
    words: list[str]
    says: list[str]
    make: Callable[[], Any] = lambda: None
    exit_code: int = 2


def rows(dtype: Any = np.float32, shape: tuple[int, ...] = ROWS) -> np.ndarray:
    return np.zeros(shape, dtype)


def npy(array: np.ndarray, **options: Any) -> Callable[[], None]:
    return lambda: np.save("x.npy", array, **options)


def cut_npy(keep: Callable[[int], int]) -> Callable[[], None]:
    def make() -> None:
        np.save("x.npy", rows())
        content = Path("x.npy").read_bytes()
        Path("x.npy").write_bytes(content[: keep(len(content))] + b"\0" * max(0, keep(len(content)) - len(content)))

    return make


def tensors(**named: np.ndarray) -> Callable[[], None]:
    return lambda: save_file(named, "x.safetensors")


def weights(change: Callable[[dict[str, np.ndarray]], Any]) -> Callable[[], None]:
    def make() -> None:
        table = {name: rows(shape=shape) for name, shape in expected_shapes(small_case()).items()}
        change(table)
        save_file(table, "w.safetensors")

    return make


def renamed(table: dict[str, np.ndarray]) -> None:
    table["layers.0.attention.q_prj.weight"] = table.pop("layers.0.attention.q_proj.weight")


def misshapen(table: dict[str, np.ndarray]) -> None:
    table["layers.1.ffn_in.weight"] = rows(shape=(64, 48))


def integers(table: dict[str, np.ndarray]) -> None:
    table["layers.1.ffn_in.bias"] = rows(np.int64, (48,))


def text(content: str, name: str = "mine.toml") -> Callable[[], Any]:
    return lambda: Path(name).write_text(content)


def toml(**changes: Any) -> Callable[[], Any]:
    table = {"name": '"mine"'} | SIZES | changes
    return text("\n".join(f"{key} = {value}" for key, value in table.items() if value is not None))


def taken() -> None:
    Path("kept").mkdir()
    Path("kept/holiday.jpg").write_bytes(b"x")


IN = ["--input", "x.npy"]
ST = ["--input", "x.safetensors"]
W = ["--weights", "w.safetensors"]
MASK = ["--mask", "m.npy"]
MINE = ["--case", "mine.toml"]

FAULTS = [
    Fault("unknown case", ["--case", "15"], ["no case `15`", "shipped cases are 1, 2"]),
    Fault("case is a folder", ["--case", "."], ["no case `.`"]),
    Fault("unknown key", MINE, ["unknown key `seqlen`", "did you mean `seq_len`?"], toml(seq_len=None, seqlen=9)),
    Fault("unknown rule", MINE, ["unknown key `rule.atoll`", "`rule.atol`"], toml(rule="{atoll = 1}")),
    Fault("missing key", MINE, ["no heads"], toml(heads=None)),
    Fault("text for a size", MINE, ["batch_size is '5'", "a whole number"], toml(batch_size='"5"')),
    Fault("half a head", MINE, ["heads is 2.5", "a whole number"], toml(heads=2.5)),
    Fault("no toml", MINE, ["mine.toml is not TOML", "configs/cases/14.toml"], text("name = ")),
    Fault("empty name", MINE, ["name"], toml(name='""')),
    Fault("does not divide", ["--heads", "5"], ["d_model 64 does not divide into 5 heads", "4"]),
    *(
        Fault(f"{size} {key}", [f"--{key.replace('_', '-')}", size], [f"{key} is {size}", "at least 1"])
        for key in SIZES
        for size in ("0", "-3")
    ),
    Fault("negative seed", ["--seed", "-1"], ["seed -1", "0 .. 2^63"]),
    Fault("no scale", ["--input-scale", "nan"], ["input_scale is nan", "positive and finite"]),
    Fault("a word for bytes", ["--host-budget", "lots"], ["`lots` is not a size", "12GiB"]),
    Fault("no bytes", ["--pinned-budget", "0"], ["`0` is not a size"]),
    Fault("tiny card", ["--device-budget", "100KiB"], ["100.00 KiB", "--device-budget"], exit_code=3),
    Fault("tiny pinned", ["--pinned-budget", "1KiB"], ["1.00 KiB", "--pinned-budget"], exit_code=3),
    Fault("tiny host", ["--host-budget", "1MiB"], ["1.00 MiB", "--host-budget"], exit_code=3),
    Fault("no card", ["--device", "cuda"], ["CUDA was asked for", "--device cpu"], exit_code=3),
    Fault("no such card", ["--device", "cuda:7"], ["cuda:7"], exit_code=3),
    Fault("no device", ["--device", "gpu"], ["no device `gpu`", "auto, cpu, cuda"], exit_code=3),
    Fault("unknown recipe", ["--recipe", "fp32/pakced"], ["unknown word `pakced`", "`packed`"]),
    Fault("recipe twice", ["--recipe", "fp32/fp16"], ["both `fp32` and `fp16`", "once"]),
    Fault("cudnn without a card", ["--recipe", "cudnn"], ["cannot serve", "needs a card"], exit_code=3),
    Fault("fa4 without a card", ["--recipe", "fp16/fa4"], ["cannot serve", "card"], exit_code=3),
    Fault("empty recipe", ["--recipe", ""], ["recipe ``", "known words"]),
    Fault("empty output", ["--output", ""], ["output"]),
    Fault("output of another kind", ["--output", "NONE"], ["an output ends in .npy"]),
    Fault("watch too far", ["--watch", "0,5"], ["row 5 cannot be watched", "batch_size 5", "from 0 to 4"]),
    Fault("watch below", ["--watch=-1"], ["row -1 cannot be watched", "from 0 to 4"]),
    Fault("no input", IN, ["x.npy cannot be opened: No such file"]),
    Fault("input is a folder", IN, ["x.npy is a directory"], lambda: Path("x.npy").mkdir()),
    Fault("input of another kind", ["--input", "x.pt"], ["x.pt ends in `.pt`", ".npy or .safetensors"]),
    Fault("empty npy", IN, ["cut short"], text("", "x.npy")),
    Fault("no npy", IN, ["no .npy file"], text("hello, world: not an array", "x.npy")),
    Fault("a byte short", IN, ["cut short", "192,128 bytes expected, 192,127 found"], cut_npy(lambda n: n - 1)),
    Fault("half", IN, ["cut short", "192,128 bytes expected"], cut_npy(lambda n: n // 2)),
    Fault("header only", IN, ["cut short"], cut_npy(lambda n: 128)),
    Fault("half a header", IN, ["cut short inside its header"], cut_npy(lambda n: 64)),
    Fault("a byte more", IN, ["goes on behind its data"], cut_npy(lambda n: n + 1)),
    Fault("wrong rank", IN, ["[750 × 64]", "[5 × 150 × 64]", "3 dimensions"], npy(rows(shape=(750, 64)))),
    Fault("wrong width", IN, ["d_model is 32 in the file and 64"], npy(rows(shape=(5, 150, 32)))),
    Fault("wrong length", IN, ["seq_len is 149 in the file and 150"], npy(rows(shape=(5, 149, 64)))),
    Fault("wrong batch", IN, ["batch_size is 4 in the file and 5"], npy(rows(shape=(4, 150, 64)))),
    Fault("float64", IN, ["dtype <f8", "<f4 or <f2"], npy(rows(np.float64))),
    Fault("big-endian", IN, ["dtype >f4"], npy(rows(">f4"))),
    Fault("integers", IN, ["dtype <i4"], npy(rows(np.int32))),
    Fault("Fortran order", IN, ["Fortran order", "ascontiguousarray"], npy(np.asfortranarray(rows()))),
    Fault("pickled", IN, ["pickled", "nothing is ever unpickled"], npy(np.array([{}], object), allow_pickle=True)),
    Fault("no tensors", ST, ["does not show which tensor"], tensors()),
    Fault("which tensor", ST, ["it holds 'a', 'b'"], tensors(a=rows(), b=rows())),
    Fault("other tensor", [*ST, "--input-tensor", "q"], ["no tensor 'q': it holds 'x'"], tensors(x=rows())),
    Fault("misshapen tensor", ST, ["d_model is 32"], tensors(x=rows(shape=(5, 150, 32)))),
    Fault("no safetensors", ST, ["x.safetensors"], text("nothing of the kind, only words", "x.safetensors")),
    Fault("no weights", W, ["no weights file `w.safetensors`"]),
    Fault("weights of another kind", W, ["not a whole safetensors file"], text("words", "w.safetensors")),
    Fault("no keys", W, ["holds 0 tensors", "missing `layers.0.norm1.weight`"], weights(dict.clear)),
    Fault("one missing", W, ["missing `final_norm.bias`"], weights(lambda t: t.pop("final_norm.bias"))),
    Fault("one renamed", W, ["missing `layers.0.attention.q_proj.weight`", "q_prj"], weights(renamed)),
    Fault("one extra", W, ["unknown `extra.bias`"], weights(lambda t: t.update({"extra.bias": rows(shape=(3,))}))),
    Fault("one misshapen", W, ["`layers.1.ffn_in.weight` is [64, 48], the case needs [48, 64]"], weights(misshapen)),
    Fault("integer weights", W, ["`layers.1.ffn_in.bias`", "floating-point"], weights(integers)),
    Fault("no mask", MASK, ["m.npy cannot be opened"]),
    Fault("short mask", MASK, ["seq_len is 149"], lambda: np.save("m.npy", rows(bool, (5, 149)))),
    Fault("mask of threes", MASK, ["holds 3 at row 0"], lambda: np.save("m.npy", rows(np.uint8, (5, 150)) + 3)),
    Fault("mask of floats", MASK, ["dtype <f4"], lambda: np.save("m.npy", rows(shape=(5, 150)))),
    Fault("no folder for the trace", ["--trace", "no/t.json"], ["no folder", "--trace"]),
    Fault("trace is a folder", ["--trace", "t"], ["t"], lambda: Path("t").mkdir()),
    Fault("no run directory", [], ["none is manifest.json", "--run-dir"], taken),
    Fault("run directory is a file", [], ["kept cannot be a run directory"], text("x", "kept")),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_fault_is_one_sentence_a_hint_and_an_exit_code(fault: Fault) -> None:
    fault.make()
    done = try_run("--output", "y.npy", *fault.words) if fault.words[:1] != ["--case"] else frontier(
        "run", "--device", "cpu", "--run-dir", "kept", "--output", "y.npy", *fault.words
    )  # fmt: skip
    assert_refused(done, fault.exit_code, *fault.says)
    assert_nothing_left()


@pytest.mark.parametrize(
    "words",
    [["--watch", "1,x"], ["--passes", "0"], ["--ring-depth", "0"], ["--ring-depth", "65"], ["--layers", "two"]],
    ids=" ".join,
)
def test_a_word_that_is_no_number_is_told_by_flag(words: list[str]) -> None:
    done = try_run("--output", "y.npy", *words)
    assert done.exit_code == 2 and f"'{words[0]}'" in done.stderr and "Traceback" not in done.stderr
    assert_nothing_left()


def test_a_mistyped_flag_or_command_is_answered_with_the_nearest() -> None:
    done = try_run("--seq-length", "3")
    assert done.exit_code == 2 and "--seq-len" in done.stderr.split("No such option")[1]
    assert frontier("rum").exit_code == 2


def test_an_input_without_a_place_for_its_output_is_asked_about() -> None:
    np.save("x.npy", rows())
    assert_refused(try_run("--input", "x.npy"), 2, "no place for its output", "--output none")
    assert try_run("--input", "x.npy", "--output", "none").exit_code == 0


@pytest.mark.parametrize("word", ["fp32", "packed", "separate", "flash", "dense", "tf32"])
def test_a_recipe_of_one_word_is_filled_up_with_what_serves_here(word: str) -> None:
    done = try_run("--recipe", word)
    assert done.exit_code == 0, done.stderr


def test_a_plan_refuses_what_the_run_would_refuse() -> None:
    plan = ("plan", "--device", "cpu", "--batch-size", "5", "--seq-len", "150")
    assert_refused(frontier(*plan, "--watch", "5"), 2, "row 5 cannot be watched")
    assert_refused(frontier(*plan, "--output", "no/y.npy"), 2, "no")


def test_the_size_of_a_file_is_asked_before_a_byte_of_it_is_read() -> None:
    torch.zeros(1)  # a 12 GB hole: were it read, this test would take minutes
    with open("x.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f4", "fortran_order": False, "shape": (5, 150, 4_000_000)}
        )
        file.truncate(12_000_000_128)
    assert_refused(try_run("--input", "x.npy", "--output", "y.npy"), 2, "d_model is 4,000,000")
