"""Numbers and names as people read them."""

from __future__ import annotations

import math


def size(count: float | None) -> str:
    """Bytes for people: `12.0 MiB`."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def duration(seconds: float | None) -> str:
    """Three significant digits: `12.3 us`, `1.20 ms`."""
    if seconds is None:
        return "-"
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if abs(seconds) * factor < 999.5:
            return f"{_three(seconds * factor)} {unit}"
    return f"{_three(seconds)} s"


def count(number: float | None, unit: str = "") -> str:
    """Three significant digits and a letter for thousands: `12.3 G`."""
    if number is None:
        return "-"
    power = 0
    while abs(number) >= 999.5 and power < 4:
        number, power = number / 1e3, power + 1
    text = f"{number:.0f}" if number == int(number) else _three(number)
    return f"{text} {('', 'k', 'M', 'G', 'T')[power]}{unit}".rstrip()


def percent(part: float | None) -> str:
    """`12.3 %`."""
    return "-" if part is None else f"{part:.1%}".replace("%", " %")


def ratio(number: float | None) -> str:
    """`1.25x`."""
    return "-" if number is None else f"{number:.2f}x"


def printable(text: str, *, lines: bool = False) -> str:
    """A text without what shows nothing or turns its surroundings round: names come from model files. Line breaks and
    tabs stay in `lines`."""
    if text.isprintable():
        return text
    if lines:
        return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))
    return "".join(c if c.isprintable() else "�" for c in text)


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _three(number: float) -> str:
    digits = 2 - math.floor(math.log10(abs(number))) if number else 0
    return f"{number:.{max(0, min(2, digits))}f}"
