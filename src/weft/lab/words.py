"""Numbers and lists as a person reads them: in the headline, the report, its plots and the terminal."""

from __future__ import annotations

from collections.abc import Sequence

_COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def plain(value: float) -> str:
    """A number with about three digits, never in powers of ten: `812`, `38.2`, `4.12`."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def ms(seconds: float) -> str:
    return plain(seconds * 1e3)


def times(ratio: float) -> str:
    """A ratio with two digits, or three close to 1: `2.4`, `1.08`, `35`."""
    return f"{ratio:.2f}" if ratio < 1.495 else f"{ratio:.2g}" if ratio < 9.95 else f"{ratio:.0f}"


def counted(number: int) -> str:
    return _COUNTS[number] if number < len(_COUNTS) else str(number)


def listed(words: Sequence[object]) -> str:
    """`a, b and c`."""
    texts = [str(word) for word in words]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def bit_rate(bit_s: float | None) -> str:
    """A link's rate: `1 Gbit/s`."""
    if bit_s is None:
        return "unlimited"
    for unit, factor in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bit_s >= 0.9995 * factor:
            return f"{bit_s / factor:.4g} {unit}"
    return f"{bit_s:.4g} bit/s"
