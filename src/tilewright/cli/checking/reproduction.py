"""The file that `check --bisect` writes: a program in plain Python, in which names of a model are only text."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from tilewright.bisection import Finding
from tilewright.cli.request import Asked, CommandRequest
from tilewright.cli.show import Screen
from tilewright.errors import InputError
from tilewright.tuning.search_limits import BISECTION

CASE = "wrong.py"
"""Where it is written, unless a name is given."""

TEMPLATE = """# What `tilewright check --bisect` found: run it with Python, from the same folder.
# It runs the model without and with the part that makes it wrong; the exit code is 1 while it is wrong.
from tilewright.cli.checking.check import again
from tilewright.cli.checking.reproduction import FailedCheck

CASE = FailedCheck(
{fields}
)

# The culprit, as text:
DETAIL = (
{detail}
)

if __name__ == "__main__":
    print(DETAIL)
    raise SystemExit(again(CASE, DETAIL))
"""


@dataclass(frozen=True, slots=True)
class FailedCheck(Asked):
    """How a model was checked, and what was found: the culprit as text, its number among the candidates, and the error
    that it makes, in units of what is allowed."""

    k: float | None
    backward: bool
    culprit: str
    number: int
    error: float

    @staticmethod
    def of(
        request: CommandRequest, k: float | None, backward: bool, found: Finding
    ) -> tuple[FailedCheck, str]:
        """The case of a request, and more of the culprit."""
        case = FailedCheck(
            **request.asked(), k=k, backward=backward, culprit=str(found.culprit), number=found.number,
            error=min(found.wrong, BISECTION.max_excess_ratio),
        )  # fmt: skip
        return case, found.culprit.detail

    def request(self) -> CommandRequest:
        """The request that it was."""
        return CommandRequest(**self.asked(), screen=Screen(None))


def write_case(path: Path, case: tuple[FailedCheck, str]) -> Path:
    """Write the program, every text in it as an ASCII literal. Raises InputError if the file cannot be written."""
    told, detail = case
    fields = "\n".join(f"    {name}={ascii(value)}," for name, value in asdict(told).items())
    lines = "\n".join(f"    {ascii(line)}" for line in detail.splitlines(keepends=True)) or "    ''"
    try:
        path.write_text(TEMPLATE.format(fields=fields, detail=lines), encoding="ascii")
    except OSError as error:
        raise InputError(f"cannot write it: {error}", phase="check", place=str(path)) from error
    return path
