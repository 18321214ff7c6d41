"""Every Triton kernel of the project as it is compiled ahead of time: a table to add to."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from frontier.case import Case
from frontier.layers import ffn_triton, join_triton, scores_triton, short_triton, stack_triton, tail_triton
from frontier.layers import tail as tail_room
from frontier.layers.costs import NORM_EPS
from frontier.layers.stack_cut import Turn, at_once, constants_of, cut_of, in_three, second_at_once, turns_of
from frontier.recipe import REFERENCE, parse_recipe

Capability = tuple[int, int]

# Shared memory that one program may take, bytes, by compute capability: CUDA C++ Programming Guide, table of
# technical specifications.
SHARED_BYTES: dict[Capability, int] = {
    (7, 5): 64 << 10, (8, 0): 163 << 10, (8, 6): 99 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10, (12, 0): 99 << 10,
}  # fmt: skip


class Build(NamedTuple):
    """A kernel, the types of its arguments, and the constants and options of one shape."""

    kernel: Any
    arguments: dict[str, str]
    sizes: dict[str, Any]


def half(capability: Capability) -> str:
    return "fp16" if capability < (8, 0) else "bf16"


def join(capability: Capability) -> Iterator[tuple[str, Build]]:
    for width, dtype, last in ((128, "fp16", False), (1024, half(capability), False), (128, "fp32", True)):
        pointers = {"x_ptr": "*fp32", "added_ptr": f"*{dtype}", "gain_ptr": "*fp32", "bias_ptr": "*fp32"}
        numbers = {name: "i32" for name in ("T", "x_stride", "added_stride", "h_stride")}
        sizes = {"D": width, "EPS": 1e-5, "ADDS": True, "KEEPS": not last, **join_triton.tile(width)}
        arguments = {**pointers, "h_ptr": f"*{dtype}", **numbers}
        yield f"width {width} {dtype}", Build(join_triton.join_kernel, arguments, sizes)


def ffn(capability: Capability) -> Iterator[tuple[str, Build]]:
    for tokens, width, dtype in ((8192, 1024, "fp16"), (8192, 32, half(capability))):
        pointers = {name: f"*{dtype}" for name in ("h_ptr", "w_ptr", "bias_ptr", "out_ptr")}
        sizes = {"D": width, **ffn_triton.tile(tokens, width, width, capability)}
        arguments = {**pointers, "T": "i32", "F": "i32", "h_stride": "i32"}
        yield f"width {width} {dtype}", Build(ffn_triton.gelu_linear_kernel, arguments, sizes)


def short(capability: Capability) -> Iterator[tuple[str, Build]]:
    """Head widths at the ends of every kind of tile; TF32 with the widest, which takes most shared memory."""
    shapes = [(8, 128, "fp16"), (32, 1024, half(capability)), (128, 128, "fp16"), (256, 128, "fp16")]
    for width, positions, dtype in [*shapes, *([(256, 128, "fp32")] if capability >= (8, 0) else [])]:
        arguments = {name: f"*{dtype}" for name in ("q_ptr", "k_ptr", "v_ptr", "out_ptr")}
        arguments |= {name: "i32" for name in ("stride_B", "stride_S", "stride_H", "S", "H")} | {"scale": "fp32"}
        sizes = {"K": width, "CAUSAL": True, "PRECISION": "tf32" if dtype == "fp32" else "ieee"}
        sizes |= short_triton.tile(width, positions, 4 if dtype == "fp32" else 2, capability)
        yield f"head width {width} {dtype}", Build(short_triton.short_kernel, arguments, sizes)


def scores(capability: Capability) -> Iterator[tuple[str, Build]]:
    for positions, dtype in ((128, "fp16"), (4096, half(capability))):
        arguments = {"scores_ptr": f"*{dtype}", "rows": "i32", "S": "i32", "scale": "fp32"}
        sizes = {"CAUSAL": True, **scores_triton.tile(positions)}
        yield f"{positions} keys {dtype}", Build(scores_triton.softmax_kernel, arguments, sizes)


def stack(capability: Capability) -> Iterator[tuple[str, Build]]:
    """Each way to attend that a card's cuts take, and each precision; few, since one takes seconds to compile."""
    shapes: list[tuple[str, str, Turn]] = [
        ("7", "fp16/held-all", "only"),
        ("5", "fp16", "only"),
        ("5", "fp16/held-small", "second"),
    ]
    if capability < (8, 0):
        shapes = [("7", "fp16", "only")]
    if capability == (9, 0):
        shapes += [("2", "fp16/held-ffn-small", "first"), ("13", "fp16", "only"), ("7", "tf32x3", "only")]
        shapes += [("6", "fp16/held-output-small", "first")]
    for name, words, turn in shapes:
        case, recipe = Case.load(name), parse_recipe(f"{words}/stack", REFERENCE)
        cut = cut_of(case, recipe, case.batch_size, case.seq_len, capability, turn)
        weights, scratch = ("fp32" if three else "fp16" for three in in_three(recipe, turn))
        arguments = {"x_ptr": "*fp32", "out_ptr": "*fp32", "valid_ptr": "*i1", "weights_ptr": f"*{weights}"}
        arguments |= {"vectors_ptr": "*fp32", "qkv_ptr": f"*{scratch}", "published_ptr": "*i32", "small_ptr": "*i32"}
        arguments |= {"call": "i32", "S": "i32", "layer_stride": "i64"}
        sizes = constants_of(case, recipe, cut, case.seq_len, turn, masked=name != "13", on_card=True)
        sizes |= cut.options
        yield f"case {name} {words} {turn}", Build(stack_triton.stack_kernel, arguments, sizes)
    if capability >= (8, 0):
        yield from at_once_builds(capability)


def at_once_builds(capability: Capability) -> Iterator[tuple[str, Build]]:
    """Both turns in one launch: with few tiles and with many."""
    for name in ("2", "13") if capability == (9, 0) else ("7",):
        case, recipe = Case.load(name), parse_recipe("fp16/stack-at-once/held-small", REFERENCE)
        cuts = [cut_of(case, recipe, case.batch_size, case.seq_len, capability, turn) for turn in turns_of(recipe)]
        cuts[1] = second_at_once(cuts[1], cuts[0])
        sizes = [
            constants_of(case, recipe, cut, case.seq_len, turn, masked=name != "13", on_card=True)
            for cut, turn in zip(cuts, turns_of(recipe), strict=True)
        ]
        arguments = {"x_ptr": "*fp32", "out_ptr": "*fp32", "valid_ptr": "*i1", "small_ptr": "*i32", "call": "i32"}
        for prefix, dtype in (("", "fp16"), ("again_", "fp32")):
            arguments |= {f"{prefix}weights_ptr": f"*{dtype}", f"{prefix}vectors_ptr": "*fp32"}
            arguments |= {f"{prefix}qkv_ptr": f"*{dtype}", f"{prefix}published_ptr": "*i32"}
        arguments |= {"S": "i32", "layer_stride": "i64", "again_layer_stride": "i64", "firsts": "i32"}
        kernel = stack_triton.stack_at_once_kernel
        yield f"case {name} at once", Build(kernel, arguments, at_once(*sizes) | cuts[0].options)


def tail(capability: Capability) -> Iterator[tuple[str, Build]]:
    for place, width in (("middle", 128), ("last", 32)) if capability >= (8, 0) else (("middle", 64),):
        dtype = half(capability) if place == "last" else "fp16"
        arguments = {"x_ptr": "*fp32", "context_ptr": f"*{dtype}", "out_ptr": "*fp32", "qkv_ptr": f"*{dtype}"}
        arguments |= {"weights_ptr": f"*{dtype}", "vectors_ptr": "*fp32", "tokens": "i32", "layer": "i32"}
        sizes = {
            "L": 4,
            "D": width,
            "F": width,
            "PLACE": place,
            "SPLIT": place == "middle",
            "EPS": NORM_EPS,
            "FAST": True,
        }
        yield (
            f"{place} {width} {dtype}",
            Build(tail_triton.tail_kernel, arguments, sizes | tail_room.tile(width, capability, place == "middle")),
        )


BUILDS: dict[str, Callable[[Capability], Iterator[tuple[str, Build]]]] = {
    "join": join, "ffn": ffn, "short": short, "scores": scores, "stack": stack, "tail": tail,
}  # fmt: skip
