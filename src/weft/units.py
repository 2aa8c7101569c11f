"""Numbers with units. `Size.parse("25MiB") == 26214400`, and `str` gives the spelling back; rates alike."""

from __future__ import annotations

import re

from weft.errors import SpellingError

_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_BPS = re.compile(r"([kmgKMG]?)(?:b(?:ps|/s)|BPS)\s*$")
"""Bits per second, as in 1gbps, 1Gb/s and 1GBPS; 1GBps and 1GB/s are bytes."""


class Size(int):
    """A number of bytes that prints with the largest unit that divides it."""

    @classmethod
    def parse(cls, text: str) -> Size:
        match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", text)
        units = {unit.lower(): factor for unit, factor in _BYTES.items()}
        factor = units.get(match[2].lower()) if match else None
        if match is None or factor is None or float(match[1]) * factor % 1:
            raise SpellingError(f"'{text}' is not a size; write a number with a unit, as in 25MiB or 64KB")
        return cls(float(match[1]) * factor)

    def __str__(self) -> str:
        for unit in ("GiB", "MiB", "KiB", "GB", "MB", "KB"):
            if self and self % _BYTES[unit] == 0:
                return f"{int(self) // _BYTES[unit]}{unit}"
        return f"{int(self)}B"

    __repr__ = __str__


class Bandwidth(int):
    """A link's rate in bits per second that prints with the largest unit that suits it."""

    @classmethod
    def parse(cls, text: str) -> Bandwidth:
        match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([A-Za-z]+?)(?:/s|ps)?\s*", _BPS.sub(r"\1bit", text))
        factor = _BITS.get(match[2].lower()) if match else None
        if match is None or factor is None or float(match[1]) * factor < 1:
            raise SpellingError(f"'{text}' is not a rate; write a number with a unit, as in 1gbit or 100mbit")
        return cls(float(match[1]) * factor)

    def __str__(self) -> str:
        unit = max((unit for unit in _BITS if _BITS[unit] <= max(1, self)), key=lambda unit: _BITS[unit])
        return f"{int(self) / _BITS[unit]:g}{unit}"

    __repr__ = __str__

    @property
    def bytes_s(self) -> float:
        return self / 8


def bytes_text(count: float) -> str:
    """A number of bytes for people: `3.4 MB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
