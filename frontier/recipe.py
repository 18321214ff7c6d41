"""How a layer is computed: one printable value, a word for each replaceable part.

Takes    words such as `fp16/packed/cudnn`.
Gives    a `Recipe`, and its one spelling for flags, records and tables.
Knows nothing of why one recipe is better than another.
"""

import difflib
from dataclasses import dataclass
from typing import Literal, get_args

from frontier.errors import Unsupported

Precision = Literal["fp32", "tf32", "fp16", "bf16"]
Projection = Literal["separate", "packed"]
Attention = Literal["dense", "cudnn", "flash", "efficient", "fa4"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Which implementation serves each replaceable part of a layer. The defaults are the slow, obvious ones.

    precision    of the GEMMs and of attention's operands; residual, LayerNorm and softmax statistics are
                 float32 under every recipe
    projection   q, k and v by three GEMMs, or by one over weights packed once
    attention    the kernel: materialised scores, or a fused kernel by name
    """

    precision: Precision = "fp32"
    projection: Projection = "separate"
    attention: Attention = "dense"

    def __str__(self) -> str:
        return f"{self.precision}/{self.projection}/{self.attention}"

    @property
    def is_half(self) -> bool:
        return self.precision in ("fp16", "bf16")

    @property
    def working_bytes(self) -> int:
        """Bytes of one element in the working precision."""
        return 2 if self.is_half else 4


REFERENCE = Recipe()

WORDS: dict[str, tuple[str, ...]] = {
    "precision": get_args(Precision),
    "projection": get_args(Projection),
    "attention": get_args(Attention),
}


def parse_recipe(text: str, base: Recipe) -> Recipe:
    """The recipe that `text` spells; parts it does not name are `base`'s.

    Every word belongs to one part only, so `fa4` alone is `base` with another attention kernel.

    Raises   Unsupported if a word is unknown (with the nearest) or a part is named twice.
    """
    part_of = {word: part for part, words in WORDS.items() for word in words}
    chosen: dict[str, str] = {}
    for word in text.strip().split("/"):
        if word not in part_of:
            nearest = difflib.get_close_matches(word, part_of, n=1, cutoff=0.5)
            raise Unsupported(
                f"recipe `{text}`: unknown word `{word}`",
                hint=f"did you mean `{nearest[0]}`?" if nearest else f"known words: {', '.join(part_of)}",
            )
        if part_of[word] in chosen:
            raise Unsupported(
                f"recipe `{text}`: both `{chosen[part_of[word]]}` and `{word}` name the {part_of[word]}",
                hint="name each part once",
            )
        chosen[part_of[word]] = word
    named = {part: chosen.get(part, getattr(base, part)) for part in WORDS}
    return Recipe(**named)  # type: ignore[arg-type]  # the words were checked against WORDS above
