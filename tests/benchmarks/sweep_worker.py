"""A worker of a sweep for tests: it answers, unless it is told to die or to sleep."""

from __future__ import annotations

import os
import time

from benchmarks.sweep import Facts, serve


def answer(case: str) -> Facts:
    """The case itself."""
    print("noise")
    if case == "die":
        os._exit(3)
    if case == "sleep":
        time.sleep(60)
    return {"case": case}


if __name__ == "__main__":
    serve(answer)
