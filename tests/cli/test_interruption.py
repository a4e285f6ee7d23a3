"""Ctrl-C while something is compiled: one line and exit code 130, whatever ran; nothing is left behind or damaged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
MODEL = """
    import torch
    def make():
        return torch.nn.Sequential(torch.nn.Linear(24, 24), torch.nn.LayerNorm(24), torch.nn.GELU()), torch.randn(5, 24)
"""
SLOW = """\
#!/bin/sh
[ "$1" = --version ] && exec g++ "$@"
echo $$ >> "$STARTED"
exec sleep 300
"""
AT_A_PHASE = """
    import os, signal, sys, torch, tilewright
    from tilewright.progress import told_to
    from net import make
    model, x = make()
    def heard(event):
        if event.phase == sys.argv[1] and event.seconds is None:
            os.kill(os.getpid(), signal.SIGINT)
    try:
        with told_to(heard), torch.no_grad():
            tilewright.compile(model, (x,))
    except KeyboardInterrupt:
        print("caught")
    with torch.no_grad():
        torch.testing.assert_close(tilewright.compile(model, (x,))(x), model(x))
        print("compiled")
"""

IN_THE_SEARCH = """
    import os, signal, sys
    import tilewright.progress
    phase, tell = sys.argv.pop(1), tilewright.progress.tell
    def heard(event):
        tell(event)
        if event.phase == phase and event.seconds is None:
            os.kill(os.getpid(), signal.SIGINT)
    tilewright.progress.tell = heard
    from tilewright.cli import main
    main()
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(textwrap.dedent(MODEL))
    (tmp_path / "phase.py").write_text(textwrap.dedent(AT_A_PHASE))
    (tmp_path / "search.py").write_text(textwrap.dedent(IN_THE_SEARCH))
    slow = tmp_path / "slow"
    slow.write_text(SLOW)
    slow.chmod(0o755)
    return tmp_path


def start(here: Path, *command: str, **environment: str) -> subprocess.Popen[str]:
    """A process in a group of its own, as a shell makes one, with an empty cache. Where the tests run in the background
    a shell has switched interruptions off."""
    given = {"TILEWRIGHT_CACHE_DIR": str(here / "cache"), "PYTHONPATH": f"{SOURCE}{os.pathsep}{here}"}
    return subprocess.Popen(
        [sys.executable, *command], cwd=here, env={**os.environ, **given, **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def started(here: Path, process: subprocess.Popen[str]) -> list[int]:
    """The processes that are the slow compiler's, once there is one."""
    deadline = time.monotonic() + 120
    while not (here / "started").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    return [int(line) for line in (here / "started").read_text().split()]


def runs(pid: int) -> bool:
    """Whether a process runs still; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("whole_group", [True, False])
def test_the_compiler_is_interrupted_with_the_verb(here: Path, whole_group: bool) -> None:
    slow = {"TILEWRIGHT_COMPILER": str(here / "slow"), "STARTED": str(here / "started")}
    process = start(here, "-m", "tilewright", "compile", "net:make", **slow)
    compilers = started(here, process)
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1] == "interrupted: what was found until now is kept"
    assert "Traceback" not in said and "warning" not in said
    assert not any(map(runs, compilers))
    checked = start(here, "-m", "tilewright", "cache", "verify")
    told = checked.communicate(timeout=60)
    assert checked.returncode == 0, told


def test_imports_that_are_interrupted_end_in_one_line(here: Path) -> None:
    (here / "click.py").write_text("import os, signal\nexec('os.kill(os.getpid(), signal.SIGINT)')\n")
    process = start(here, "-m", "tilewright", "env")
    assert process.communicate(timeout=60) == ("", "interrupted\n")
    assert process.returncode == 130


def test_an_interruption_within_exec_does_not_end_the_command_by_the_signal(here: Path) -> None:
    (here / "broken.py").write_text("import os, signal\nexec('os.kill(os.getpid(), signal.SIGINT)')\n")
    process = start(here, "-m", "tilewright", "inspect", "broken:make")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and said.splitlines()[-1].startswith("interrupted")


@pytest.mark.parametrize("phase", ["capture", "schedule", "build"])
def test_python_gets_its_own_exception_and_may_go_on(here: Path, phase: str) -> None:
    process = start(here, "phase.py", phase)
    told, said = process.communicate(timeout=240)
    assert told.split() == ["caught", "compiled"], said


@pytest.mark.parametrize(
    ("phase", "arguments"),
    [
        ("partition", ("compile", "net:make", "-o", "kept.tw", "--json", "out.json")),
        ("schedule", ("bench", "net:make", "--seconds", "0.1", "--json", "out.json", "--html", "bench.html")),
        ("schedule", ("tune", "net:make", "--budget", "9s", "--json", "out.json")),
        ("schedule", ("check", "net:make", "--backward", "--json", "out.json")),
    ],
)
def test_a_search_that_is_interrupted_ends_the_verb(
    here: Path, phase: str, arguments: tuple[str, ...]
) -> None:
    (here / "kept.tw").write_bytes(b"an earlier one")
    process = start(here, "search.py", phase, *arguments, TILEWRIGHT_MEASURE="1")
    _, said = process.communicate(timeout=240)
    assert process.returncode == 130
    assert (
        said.splitlines()[-1] == "interrupted: what was found until now is kept" and "Traceback" not in said
    )
    assert json.loads((here / "out.json").read_text())["exit_code"] == 130
    assert (here / "kept.tw").read_bytes() == b"an earlier one"
    assert not (here / "bench.html").exists() and not list(here.glob(".*"))
    if arguments[0] == "tune":
        assert json.loads((here / "tuning.json").read_text())["devices"]
