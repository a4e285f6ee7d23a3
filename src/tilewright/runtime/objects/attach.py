"""What native code needs of Python and torch is handed to it once, when its library is loaded."""

from __future__ import annotations

import ctypes

from . import known_call, reading, standing, watching

SOURCES = (reading.SOURCE, standing.SOURCE, known_call.SOURCE)
"""Stand in front of the text of a library that sees objects, in this order."""


def text_before(own: str) -> str:
    """The text of a library that sees objects, whose own is `own`."""
    return "\n".join([*(source.read_text(encoding="utf-8") for source in SOURCES), own])


def attach(library: ctypes.CDLL) -> bool:
    """Let `library`, whose text begins with `SOURCES`, see Python and torch. False where interpreters have no lock, or
    one of the two is not as expected: nothing of it that looks at objects may then be called."""
    if not reading.attach(library):
        return False
    standing.attach(library)
    known_call.attach(library)
    watching.attach(library)
    return True
