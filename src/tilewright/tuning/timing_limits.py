"""How long and how often things are timed: what is fastest, for the compiler and for a user."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ComparisonLimits:
    """How ways to compute the same are timed against each other."""

    max_preferred_ratio: float = 0.97
    """What is later in order, or behind a better one by the model, must take at most this part of the time of the best
    before it."""
    max_rounds: int = 9
    """Runs of each way that is compared, at most."""
    min_rounds: int = 3
    """Runs of each way before a limit of time counts."""


COMPARISON = ComparisonLimits()


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """Timing of a region's covers."""

    max_modelled_slowdown_ratio: float = 1.4
    """Covers that the model takes for slower than the best one by at most this factor may be faster."""
    specialised_time_ratio: float = 0.68
    """What a loop over keys with specialised warps may take of the usual time: the best seen with 64 or 128 channels,
    791 us of 1169 (benchmarks/results/h200/gluon_printed.json, `sdpa bf16`)."""
    max_doubtful_gain_ratio: float = 4.0
    """Kernels of a region that the model sees ahead of library calls by at most this factor are timed beside them."""
    max_timed_covers: int = 3
    """Covers that are timed."""
    min_seconds_to_time: float = 1e-4
    """Seconds of the best cover from which on timing is worth what building the others takes."""
    max_seconds_to_time: float = 0.1
    """Seconds of the best cover up to which covers are timed: unknown sizes are taken for large ones, the model may
    err by a factor of ten, and all of them together may be more than anybody would wait for, or than memory holds."""
    max_considered_sets: int = 8
    """Sets of kernels of which the best are looked at."""
    seconds_per_region: float = 0.4
    """About how long the covers of one region run."""
    max_first_runs_seconds: float = 2.0
    """Seconds of the covers' first runs from which on no more is measured: the model may err. If some have not run by
    then, it decides."""


TRIAL = TrialLimits()


@dataclass(frozen=True, slots=True)
class TimerLimits:
    """Timing of what libraries and our own code offer."""

    max_seconds: float = 1.5
    """About how long all measuring of one compilation may take."""
    max_region_seconds: float = 0.08
    """About how long all measuring of one region may take."""
    hopeless_ratio: float = 1.5
    """How much longer than the best a way may take after the fewest rounds to be timed on."""
    max_steady_ratio: float = 1.25
    """How much longer than its best run the middle one of the winner may have taken in a quiet measurement."""
    max_measurements: int = 3
    """Measurements after which a choice stands, however noisy they were."""
    max_repeated_choices: int = 1
    """Noisy choices that a compilation measures again; one that finds a choice for everything measures nothing, so
    that it is short and finds what was built."""
    min_bound_ratio: float = 0.95
    """A time may be this part of what memory allows at least; one below was not that of the whole work."""
    drawn_elements: int = 65536
    """Random numbers that operands are filled with again and again: more than any predictor of branches remembers."""


TIMER = TimerLimits()


@dataclass(frozen=True, slots=True)
class TuningLimits:
    """`tilewright tune`."""

    max_budget_seconds: float = 1e6
    """Seconds that may be asked for: eleven days."""
    max_turns: int = 4
    """How often a model is compiled: noisy choices are timed again, and those for which there was no time."""
    seconds_between_writes: float = 1.0
    """What was found is written so often, for whoever is ended meanwhile."""


TUNING = TuningLimits()


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """Timing on a GPU, by captured graphs."""

    runs: int = 20
    """Runs one after the other in a graph, so that its own start is little beside them."""
    replays: int = 5
    """Replays of which the fastest counts."""


REPLAYS = ReplayLimits()


@dataclass(frozen=True, slots=True)
class ProductLimits:
    """Kernels of products of matrices with what stands behind them, and their timing beside a library's products."""

    max_autotune_seconds: int = 120
    """What `mode="max-autotune"` gives the building and timing of kernels of a graph: who asks for all that tuning
    finds waits for it, once."""
    max_ops: int = 24
    """Ops of a group."""
    min_times_smaller: int = 8
    """How much smaller a value is at least that each block computes for itself."""
    max_siblings: int = 3
    """Products of the same rows that become one kernel: queries, keys and values."""
    max_parts: int = 16
    """Parts of a sum at most, where few grid points leave cores idle."""
    tried_part_counts: int = 2
    """Numbers of parts that are looked at: the largest."""
    max_points_per_core: int = 2
    """Grid points of a core at most in a kernel of parts: more parts leave no core less idle."""
    max_of_parts: int = 4
    """Schedules of a kernel of parts that are looked at."""
    max_timed: int = 8
    """Schedules of a group that are timed, those first that the model takes for the fastest."""
    min_timed: int = 2
    """Schedules of a group that are timed, if there is time for all groups."""
    builds_per_core_second: float = 1.0
    """Kernels that a core builds in a second, about: the budget of seconds says how many are tried."""
    min_caches_between_turns: int = 2
    """How many times the last cache is filled between two turns of a set of operands."""
    other_sizes: tuple[float, ...] = (0.125, 8.0)
    """What is timed beside the typical sizes, where some are unknown: as many times as large."""
    max_difference_ratio: float = 0.1
    """Part of the largest element by which a kernel's results differ from the library's at most: sums of half types are
    rounded in another order."""
    max_sets: int = 8
    """Sets of operands that runs take in turns, so that none finds its own in the last cache."""
    max_front_sum: int = 49
    """Terms of each sum of a product that another product may take in: those of a window of 7 x 7."""
    max_joined_ratio: float = 1.25
    """Modelled seconds of kernels that take in the one in front, beside those of all apart: more is not timed."""
    max_preferred_ratio: float = 0.98
    """Part of the library's time that a kernel takes at most to be preferred."""


PRODUCTS = ProductLimits()


@dataclass(frozen=True, slots=True)
class MeasurementLimits:
    """Timing for a user."""

    noisy_variation_ratio: float = 0.05
    """Coefficient of variation above which a timing is called noisy."""
    pause_seconds: float = 0.03
    """Seconds of silence before a sample: with nothing running in this process."""
    max_pause_seconds: float = 0.5
    """Seconds after which threads that never sleep are waited for no longer."""
    max_quiet_core_ratio: float = 0.1
    """The part of a core that a process uses at most whose threads sleep."""
    min_sample_seconds: float = 1e-3
    """Calls shorter than this are timed several at once, so that the clock's own cost stays below a thousandth."""
    step_warm_calls: int = 3
    """Calls of a model before its steps are timed."""
    step_calls: int = 20
    """Calls of a model in which each of its steps is timed."""
    bound_slack_ratio: float = 0.05
    """How far below its lower bound a timing may lie before it counts as impossible."""


MEASUREMENT = MeasurementLimits()
