"""`python -m tilewright._build [FILE]`: builds Triton kernels, one JSON job a line in, one JSON answer a line out.

Jobs (`runtime.cuda.job.Job`) come from FILE or standard input. An answer is `{"job": digest of
the line, "code": base64, "text": ..., "facts": {...}}` or `{"job": ..., "error": message}`. Works without a GPU. The
process ends with its input.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TextIO

from tilewright.runtime.cuda.job import Job
from tilewright.runtime.cuda.triton_compat import compile_job
from tilewright.runtime.store.cache import digest

from .errors import BuildError


def answer(line: str) -> str:
    """The answer to one job, as one line."""
    named = {"job": digest(line)}
    try:
        job = Job.from_json(line)
        with tempfile.TemporaryDirectory(prefix="kernel-", ignore_cleanup_errors=True) as folder:
            code, text, facts = compile_job(job, Path(folder))
    except (BuildError, OSError, ImportError) as error:
        message = error.message if isinstance(error, BuildError) else f"{type(error).__name__}: {error}"
        return json.dumps(named | {"error": message})
    return json.dumps(named | {
        "code": base64.b64encode(code).decode(), "text": text, "facts": json.loads(facts.to_json())
    })  # fmt: skip


def serve(source: TextIO, sink: TextIO) -> None:
    """Answer every line of `source` in `sink`."""
    for line in source:
        if line.strip():
            sink.write(answer(line.rstrip("\n")) + "\n")
            sink.flush()


def main(arguments: list[str]) -> int:
    """Serve a file or standard input. What compilers print goes to standard error."""
    sink = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if arguments:
        with open(arguments[0], encoding="utf-8") as source:
            serve(source, sink)
    else:
        serve(sys.stdin, sink)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
