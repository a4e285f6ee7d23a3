"""Options: one place for every knob, checked wherever it comes from."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest

from tilewright.errors import InputError
from tilewright.options import _CHECKS, PREFIX, Options


def test_every_field_has_a_check_and_the_other_way_round() -> None:
    assert {field.name for field in dataclasses.fields(Options)} == set(_CHECKS)


def test_defaults_pass_their_own_checks() -> None:
    assert Options.make(dataclasses.asdict(Options()), {}) == Options()


def test_code_wins_over_environment() -> None:
    environ = {PREFIX + "THREADS": "3", PREFIX + "STRICT": "1", "THREADS": "9"}
    made = Options.make({"threads": 2}, environ)
    assert made.threads == 2 and made.strict
    assert Options.make(made, environ) is made


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("freeze", "none", None),
        ("freeze", "0", False),
        ("cache", "off", False),
        ("threads", "1", 1),
        ("cache_dir", "1", "1"),
        ("trim", "exact", "exact"),
    ],
)
def test_words_of_the_environment(name: str, text: str, value: object) -> None:
    made = dataclasses.asdict(Options.make(None, {PREFIX + name.upper(): text}))
    assert made[name] == value and type(made[name]) is type(value)


def test_modes_stand_for_options() -> None:
    environ = {PREFIX + "TUNE_SECONDS": "7", PREFIX + "THREADS": "3"}
    plain, tuned = (Options.make(None, environ, mode=m) for m in ("reduce-overhead", "max-autotune"))
    assert plain == Options(cuda_graphs=True, tune_seconds=7, threads=3)
    assert tuned.cuda_graphs and tuned.tune_seconds > 7
    alone = Options.make(None, {}, mode="max-autotune-no-cudagraphs")
    assert alone == dataclasses.replace(tuned, cuda_graphs=False, threads=None)
    assert Options.make(None, environ, mode="default") == Options.make(None, environ)


def test_options_go_before_modes() -> None:
    assert not Options.make({"cuda_graphs": False}, {}, mode="reduce-overhead").cuda_graphs
    assert Options.make(Options(threads=2), {}, mode="reduce-overhead") == Options(
        threads=2, cuda_graphs=True
    )


def test_unknown_modes_hint_at_the_nearest() -> None:
    with pytest.raises(InputError, match="unknown mode 'max-autotun'.*did you mean 'max-autotune'"):
        Options.make(None, {}, mode="max-autotun")


def test_a_path_is_text(tmp_path: Path) -> None:
    assert Options.make({"cache_dir": tmp_path}, {}).cache_dir == str(tmp_path)


def test_unknown_name_hints_at_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'threads'"):
        Options.make({"thread": 1}, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("threads", 0),
        ("threads", True),
        ("strict", 1),
        ("trim", "maybe"),
        ("cache_dir", ""),
        ("tuning_file", ""),
    ]
    + [("tune_seconds", value) for value in (-1, "soon", None, True, 2.5, float("nan"))],
)
def test_wrong_values_are_refused(name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"option {name} cannot be"):
        Options.make({name: value}, {})
    with pytest.raises(InputError):
        Options().replace(**{name: value})
    with pytest.raises(InputError, match=f"option {name} cannot be"):
        Options(**{name: value})  # pyright: ignore[reportArgumentType]


def test_a_bad_environment_names_its_variable() -> None:
    with pytest.raises(InputError, match=PREFIX + "THREADS"):
        Options.make(None, {PREFIX + "THREADS": "many"})


def test_digest_follows_what_changes_code() -> None:
    base = Options()
    assert base.digest() == Options().digest()
    assert base.replace(cache_dir="/elsewhere").digest() == base.digest()
    for change in (
        {"threads": 2},
        {"rules": False},
        {"fusion": "none"},
        {"early_launch": "none"},
        {"trim": "exact"},
        {"strict": True},
        {"freeze": False},
    ):
        assert base.replace(**change).digest() != base.digest()


def test_a_variable_that_looks_like_an_option_is_told_once() -> None:
    for _ in range(2):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            Options.make(environ={"TILEWRIGHT_STRICKT": "1", "OTHER": "1"})
        told = [str(w.message) for w in seen]
        assert told in (
            ["TILEWRIGHT_STRICKT in the environment is no option; did you mean TILEWRIGHT_STRICT?"],
            [],
        )
    assert not told
