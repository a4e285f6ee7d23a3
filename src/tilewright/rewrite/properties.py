"""What is known of every value of a set of ops, from access maps and bodies alone (FlashTensor, PPoPP'25)."""

from __future__ import annotations

from .interval import Interval, Sign
from .sign import Known, sign_of, signs_of

__all__ = ["Interval", "Known", "Sign", "sign_of", "signs_of"]
