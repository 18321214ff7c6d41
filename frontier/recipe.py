"""How a layer is computed: one printable value, a word for each replaceable part.

Takes    words such as `fp16/packed/cudnn` or `fp16/stack`.
Gives    a `Recipe`, and its one spelling for flags, records and tables.
Knows nothing of why one recipe is better than another.
"""

import difflib
from dataclasses import dataclass
from typing import Literal, cast, get_args

from frontier.errors import CaseError

Precision = Literal["fp32", "tf32", "tf32x3", "fp16", "bf16"]
Projection = Literal["separate", "packed"]
Attention = Literal["dense", "cudnn", "flash", "efficient", "fa4", "short", "scores"]
Join = Literal["torch-join", "triton-join"]
Ffn = Literal["torch-ffn", "triton-ffn"]
HeldAtOnce = Literal["held-none", "held-projections", "held-ffn", "held-output", "held-all"]
Held = Literal[HeldAtOnce, "held-small", "held-ffn-small", "held-output-small"]
Launch = Literal["eager", "graph", "compile", "compile-reduce-overhead", "compile-max-autotune"]
Fusion = Literal["by-part", "tail", "stack", "stack-at-once"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Which implementation serves each replaceable part of a layer. The defaults are the slow, obvious ones.

    precision    of the GEMMs and of attention's operands; residual, LayerNorm and softmax statistics are
                 float32 under every recipe; tf32x3 is float32 by three TF32 products
    projection   q, k and v by three GEMMs, or by one over weights packed once
    attention    the kernel: materialised scores, or a fused kernel by name
    join         residual add, LayerNorm and cast: PyTorch's, or one Triton kernel
    ffn          bias and gelu behind the first feed-forward GEMM, or in its epilogue
    held         GEMMs that keep more digits where `precision` is lower: some, all, or attention's output
                 projection for the first tokens of a row alone, where most of the error is; with `small`, rows
                 that have a small token, whose rounding the last norm would magnify, are done again in float32
    launch       eager, one CUDA graph a shape, or a mode of `torch.compile`
    fusion       part by part; or one kernel for all between two attentions, which leaves no join or ffn to choose;
                 or the whole stack as one kernel, which fixes every part but precision and held; `at-once`: where
                 rows are done again, in the same launch
    """

    precision: Precision = "fp32"
    projection: Projection = "separate"
    attention: Attention = "dense"
    join: Join = "torch-join"
    ffn: Ffn = "torch-ffn"
    held: Held = "held-none"
    launch: Launch = "eager"
    fusion: Fusion = "by-part"

    def __post_init__(self) -> None:
        for part in FIXED[self.fusion]:
            if getattr(self, part) not in DEFAULTS:
                raise CaseError(f"a recipe of fusion {self.fusion} has no {part} to choose", hint="use parse_recipe")

    def __str__(self) -> str:
        """Precision, projection and attention always; of the rest, what is not the default."""
        if self.is_one_kernel:
            return f"{self.precision}/{self.fusion}" + f"/{self.held}" * (self.held != "held-none")
        rest = [getattr(self, part) for part in ("join", "ffn", "held", "launch", "fusion")]
        told = [word for word in rest if word not in DEFAULTS]
        return "/".join([self.precision, self.projection, self.attention, *told])

    @property
    def is_half(self) -> bool:
        return self.precision in ("fp16", "bf16")

    @property
    def is_one_kernel(self) -> bool:
        return self.fusion in ("stack", "stack-at-once")

    @property
    def redoes_small(self) -> bool:
        """Whether rows with a small token are done again."""
        return self.held.endswith("small")

    @property
    def held_at_once(self) -> HeldAtOnce:
        """The GEMMs that are held for all rows, whichever rows are done again."""
        return cast(HeldAtOnce, "held-none" if self.held == "held-small" else self.held.removesuffix("-small"))

    @property
    def working_bytes(self) -> int:
        """Bytes of one element in the working precision."""
        return 2 if self.is_half else 4


WORDS: dict[str, tuple[str, ...]] = {
    "precision": get_args(Precision),
    "projection": get_args(Projection),
    "attention": get_args(Attention),
    "join": get_args(Join),
    "ffn": get_args(Ffn),
    "held": get_args(Held),
    "launch": get_args(Launch),
    "fusion": get_args(Fusion),
}
DEFAULTS = {words[0] for words in WORDS.values()}

# Parts that a fusion leaves no choice of.
FIXED: dict[str, tuple[str, ...]] = {
    "by-part": (),
    "tail": ("join", "ffn"),
    "stack": ("projection", "attention", "join", "ffn", "launch"),
    "stack-at-once": ("projection", "attention", "join", "ffn", "launch"),
}
REFERENCE = Recipe()


def parse_recipe(text: str, base: Recipe) -> Recipe:
    """The recipe that `text` spells; parts it does not name are `base`'s.

    Every word belongs to one part only, so `fa4` alone is `base` with another attention kernel. A text that names
    precision, projection and attention is whole: what it leaves out is the default. Naming a fusion keeps no join,
    ffn, held or launch of the base's; naming a part that the base's fusion fixes takes it apart again.

    Raises   CaseError if a word is unknown (with the nearest), a part is named twice, or one that its
             fusion fixes.
    """
    part_of = {word: part for part, words in WORDS.items() for word in words}
    chosen: dict[str, str] = {}
    for word in text.strip().split("/"):
        if word not in part_of:
            nearest = difflib.get_close_matches(word, part_of, n=1, cutoff=0.5)
            raise CaseError(
                f"recipe `{text}`: unknown word `{word}`",
                hint=f"did you mean `{nearest[0]}`?" if nearest else f"known words: {', '.join(part_of)}",
            )
        if part_of[word] in chosen:
            raise CaseError(
                f"recipe `{text}`: both `{chosen[part_of[word]]}` and `{word}` name the {part_of[word]}",
                hint="name each part once",
            )
        chosen[part_of[word]] = word
    if {"precision", "projection", "attention"} <= set(chosen):
        base = REFERENCE
    is_taken_apart = "fusion" not in chosen and not set(chosen).isdisjoint(FIXED[base.fusion])
    fusion = chosen.get("fusion", "by-part" if is_taken_apart else base.fusion)
    if clash := [part for part in FIXED[fusion] if part in chosen]:
        raise CaseError(
            f"recipe `{text}`: `{fusion}` has no {' and no '.join(clash)} to choose",
            hint=f"leave out {' and '.join(f'`{chosen[part]}`' for part in clash)}",
        )
    reset = {"join", "ffn", "held", "launch"} if "fusion" in chosen else set()
    kept = {part: getattr(REFERENCE if part in reset | {*FIXED[fusion]} else base, part) for part in WORDS}
    return Recipe(**kept | chosen | {"fusion": fusion})  # type: ignore[arg-type]  # the words were checked above
