"""Reads "12GiB" and prints bytes, seconds and rates the one way we print them.

Takes    text from flags, numbers from records.
Gives    bytes as int, and short texts with a unit.
Knows nothing of what the numbers measure.
"""

import re
from fractions import Fraction

from frontier.errors import CaseError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

_FACTORS = {
    "": 1, "b": 1,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip


def parse_bytes(text: str) -> int:
    """The bytes that "12GiB", "256 MiB" or "13.1 GB" name.

    Units    GiB counts in 1,024s, GB in 1,000s; a bare number is bytes.
    Raises   CaseError if the text is no positive size.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    count = int(Fraction(match[1]) * factor) if match and factor else 0
    if not 1 <= count < 1 << 80:
        raise CaseError(f"`{text}` is not a size in bytes", hint="write it as 12GiB, 256MiB or 13.1GB")
    return count


def show_bytes(count: int) -> str:
    """`count` bytes in the binary unit that leaves one to four digits before the point."""
    for factor, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= factor:
            return f"{count / factor:,.2f} {unit}"
    return f"{count} B"


def show_seconds(seconds: float) -> str:
    """A duration as people read it: 12.3 ms, 4.56 s, 3 min 20 s, 2 h 05 min."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 100:
        return f"{seconds:.3g} s"
    whole_minutes, rest_s = divmod(round(seconds), 60)
    if whole_minutes < 60:
        return f"{whole_minutes} min {rest_s:02d} s"
    hours, minutes = divmod(whole_minutes, 60)
    return f"{hours} h {minutes:02d} min"


def show_flops(flops: float) -> str:
    """A count of floating-point operations: 1.391 PFLOP."""
    for factor, unit in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP")):
        if flops >= factor:
            return f"{flops / factor:.4g} {unit}"
    return f"{flops / 1e6:.4g} MFLOP"
