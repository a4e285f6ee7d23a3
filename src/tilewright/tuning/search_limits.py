"""Bounds on what is searched, tried, remembered and timed. Another value takes more or less time to compile, or finds
something else.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpressionLimits:
    """Expressions: what is remembered, rewritten and written out."""

    max_written_index_nodes: int = 512
    """Nodes of an index written out, up to which indices are put into each other: kernels and their texts name no
    parts of an index, and each place divided by a size and joined again is used several times by the next."""
    memo_objects: int = 1 << 15
    """Objects whose parts are remembered."""
    memo_rewrites: int = 1 << 16
    """Results that a rewriter remembers; when there are more, it starts anew."""
    memo_bodies: int = 1 << 14
    """Bodies of ops in kernels that are remembered, with what they read put in; when there are more, it starts anew."""
    max_rewrites_of_a_node: int = 200
    """Rewrites of one node before the rule set is called divergent."""
    memo_results: int = 1 << 16
    """Results that each operation remembers: expressions are interned, so a look-up is by identity."""
    max_cases_of_a_size: int = 3
    """How often the range of a size is taken in two, one within another, to prove that two sizes are equal: a slice has
    two ends, and a length that is not below 0."""


EXPRESSIONS = ExpressionLimits()


@dataclass(frozen=True, slots=True)
class LinearFormLimits:
    """Sums of products that indices and sizes are brought into."""

    max_terms: int = 32
    """Terms of a form that axes or data decide. Places have a few per dim; arithmetic of a program may square its
    terms with each step, so what has more stays a sum or product of its parts, which is an atom of what is made of
    it."""
    max_factors: int = 16
    """Atoms of a term that axes or data decide: repeated squares have few terms, but twice the atoms with each step."""
    max_size_terms: int = 256
    """Terms, and atoms of a term, that sizes alone decide: a join of many parts has one for each, and whether sizes
    are equal is asked of all."""
    max_coefficient_bits: int = 256
    """Bits of a coefficient, which repeated squares double."""
    max_readable_nodes: int = 256
    """Nodes of an atom that is ordered by its text; the text of one that shares its parts may have no end."""
    max_equal_dims: int = 4
    """Dims of one tensor that have the same size, an index being one. A product of more such sizes is taken for
    arithmetic of a program, which may wrap around; so is the place in a tensor of more equal dims, which costs its
    kernels speed."""
    max_unknown_dims: int = 8
    """Dims of one tensor whose sizes are not known, equal or not."""


LINEAR_FORMS = LinearFormLimits()


@dataclass(frozen=True, slots=True)
class FactLimits:
    """What is looked at to prove a fact."""

    max_repeated_checks: int = 1024
    """Times that one kernel computes, under other conditions, what may fail and is computed already: beyond this many
    its text has no end worth waiting for, and ops are better apart."""
    inverse_count_error: float = 1e-6
    """Relative error up to which a constant counts as the inverse of a count."""
    max_cases: int = 8
    """Cases that an expression may have; with more it counts as one."""
    max_test_nodes: int = 64
    """Nodes of a test of data that is kept as it is."""
    max_condition_terms: int = 24
    """Terms that a condition may have; a larger one stays a single opaque literal."""
    max_inlined_nodes: int = 4096
    """Nodes of an expression that is put into its readers."""
    max_sign_rounds: int = 24
    """Rounds in which the signs of a reduction's state are to reach a fixed point."""
    exact_sign_rounds: int = 2
    """Rounds after which bounds of a reduction's state that still move are widened."""
    max_loop_levels: int = 8
    """Levels of loops whose ends depend on the loop around them."""
    max_numbers: int = 16
    """Numbers that an expression has at most, since those of its choices multiply: with more, a value may be
    missed."""


FACTS = FactLimits()


@dataclass(frozen=True, slots=True)
class OnlineLimits:
    """Bodies that the online law is sought for."""

    max_terms: int = 64
    """Terms of a body beyond which it is not looked at."""
    max_power: int = 6
    """The largest power of a body that is expanded."""


ONLINE = OnlineLimits()


@dataclass(frozen=True, slots=True)
class RepeatLimits:
    """Equal steps that are sought in a graph."""

    piece_lengths: tuple[int, ...] = (2, 8, 32, 128)
    """Lengths of pieces of keys whose next occurrence tells a period: short ones for short steps, long ones for steps
    that repeat something within themselves."""
    max_periods: int = 8
    """Periods that are tried."""
    max_phases: int = 4
    """Places in a step at which it is tried to begin."""
    max_steps_back: int = 8
    """How many steps back a step may read."""
    max_cycle: int = 8
    """Steps of which each is another one, that come again and again: they are taken as one."""
    min_cycles: int = 4
    """How often they come at least."""
    min_part_steps: int = 10
    """Steps from which on the parts of a long run that is interrupted again and again are loops: each costs some
    seconds of compile time, as many as so many steps."""


REPEATS = RepeatLimits()


@dataclass(frozen=True, slots=True)
class PartCounts:
    """Numbers of parts that are tried, by what is cut."""

    of_few_rows: tuple[int, ...] = (4, 16, 64)
    """Into how many parts a cascade is cut, at most, if it has few rows."""
    of_long_rows: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
    """Numbers of parts that cascades of few long rows are tried in."""
    of_columns: tuple[int, ...] = (1, 4, 8, 32, 128)
    """Numbers of parts of columns, of which the fastest by the model is taken: many keep all cores busy, few leave
    little to merge. The number is the same whatever the sizes are, so that a block holds all parts of a column."""
    of_reductions: tuple[int, ...] = (4, 16, 64, 256, 1024)
    """Numbers of parts of a reduction that are tried on a machine whose cores run many blocks at once."""
    for_few_cores: tuple[int, ...] = (4, 8, 16, 32, 64)
    """The same where each core runs one thread."""


CASCADE_PARTS = PartCounts()


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Library calls: their epilogues, and how a fused routine is recognised."""

    max_epilogue_ops: int = 8
    """Pointwise ops that may become one epilogue."""
    score_deviations: tuple[float, ...] = (1.0, 30.0, 1000.0)
    """Standard deviations of the scores that are tried: caps and clamps show at large ones."""
    equal_result_ratio: float = 1e-9
    """Relative difference of results that counts as rounding of fp64."""
    random_rows: int = 2
    """Rows that are compared at each spread, beside the first two and the last one."""


CALLS = CallLimits()


@dataclass(frozen=True, slots=True)
class CandidateLimits:
    """Kernels of a region that are considered and priced."""

    max_cuts: int = 6
    """Values at which a region may be cut that are considered."""
    max_tried_pairs: int = 1 << 10
    """Pairs of stores and cuts that are tried: beyond it fewer cuts are considered."""
    max_set_slowdown_ratio: float = 1.15
    """Kernels that only stand in sets slower than the best one by this factor are not considered."""
    max_separate_results: int = 4
    """Results up to which each of them may be stored without the others."""
    max_priced_kernels: int = 96
    """Kernels up to which all are priced; of more than these, those that a guess takes for the best, and more of them
    only until some set of them makes what is required."""
    max_priced_ops: int = 1 << 12
    """Ops of priced kernels, each as often as it is in one: as many as that number of kernels have in a region of some
    40 ops. Forms take longer with each op, and of a larger region fewer kernels are priced."""
    max_refused_ops: int = 1 << 15
    """Ops of kernels, those without a legal form among them, after which a region of which no set is found stays in
    library calls."""
    max_guess_rate_ratio: float = 2.0
    """A guess is at most so many times the rates of a library, however long all kernels take that were priced so
    far."""
    priced_per_round: int = 16
    """Kernels that are priced before the others are guessed anew."""
    max_region_results: int = 8
    """Values that a region leaves behind, at most: what leaves more is not the surroundings of a product but a good
    part of a model, and which kernels might store what of so much cannot be enumerated."""


CANDIDATES = CandidateLimits()


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Groups of ops that grow into kernels."""

    max_value_span: int = 256
    """Places from its first op to its last reader over which a value is known by its distance: one that is used
    further away, and often, is known by itself."""
    max_far_readers: int = 4
    """Readers of a value that is known by its distance however far away they are: what an optimizer does with one of
    hundreds of tensors stands as many places apart, and the same is done with the others."""
    max_kernel_operands: int = 256
    """Operands of the ops of one kernel: an op of more stays alone."""
    max_priced_kernels: int = 20_000
    """Kernels that are not alike and are priced for one graph; then groups stay as they are."""
    max_compared_views: int = 32
    """Views of one value up to which each is held against each other one."""
    max_joined_step_ops: int = 512
    """Ops of all steps of a loop's body that one round computes: compilation takes longer with each."""
    max_path_edges: int = 4096
    """Edges that each end looks along before a path is taken for granted."""
    label_distance: int = 1 << 256
    """Difference of neighbouring labels where no group has moved yet."""


GROUPS = GroupLimits()


@dataclass(frozen=True, slots=True)
class ScheduleLimits:
    """What a schedule is sought for, and where its work is counted."""

    max_loop_sets: int = 32
    """Sets of loops around one reduction that are told apart; where there are more, it is taken to stand in all of
    them."""
    work_samples: int = 3
    """Grid points at which the work of a kernel is counted."""
    min_shared_bytes: int = 1 << 10
    """Bytes of shared memory below which no schedule is looked for that needs less."""


SCHEDULES = ScheduleLimits()


@dataclass(frozen=True, slots=True)
class MatmulBlockChoices:
    """Candidates for a block of products on matrix units."""

    grid_tiles: tuple[int, ...] = (64, 128)
    """Tiles of a class on the grid."""
    small_tiles: tuple[int, ...] = (16, 32)
    """Further ones, also of what is streamed, where a block has many products, whose sums share its registers."""
    max_wide_products: int = 4
    """Products of a block up to which it has none of these."""
    streamed_tiles: tuple[int, ...] = (32, 64, 128)
    """Tiles of a class that is streamed."""
    warps: tuple[int, ...] = (4, 8)
    """Warps of a block."""
    stages: tuple[int, ...] = (2, 3, 4)
    """Stages of a block's loops."""


MATMUL_BLOCKS = MatmulBlockChoices()


@dataclass(frozen=True, slots=True)
class ProposalChoices:
    """Schedules that are proposed for a plain product of matrices, to be timed against each other."""

    sides: tuple[int, ...] = (16, 32, 64, 128, 256)
    """Tiles of the rows and of the columns of the result."""
    depths: tuple[int, ...] = (16, 32, 64, 128)
    """Tiles of the class that is summed over."""
    min_walked_depth: int = 32
    """Products from which on steps that are in one tap of a convolution are worth being shorter than others."""
    warps: tuple[int, ...] = (4, 8)
    """Warps of a block."""
    stages: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Stages of a block's loop."""
    orders: tuple[int, ...] = (0, 4, 8, 16)
    """Rows of blocks that are numbered together (`LaunchConfig.order`), where operands exceed the last cache."""
    stored_pieces: int = 2
    """Pieces in which descriptors store the results of a block that loads for the next grid point meanwhile."""
    results_side_by_side: tuple[int, ...] = (1, 2, 4, 7, 8)
    """Results of a window that one thread has."""
    lanes: tuple[int, ...] = (16, 32, 64, 128, 256)
    """Elements along memory of a block of windows."""
    window_warps: tuple[int, ...] = (1, 2, 4, 8)
    """Warps of such a block."""
    window_access_parts: tuple[int, ...] = (1, 2, 4)
    """Parts of a wide access that a thread has of each result: of less, registers hold more results and threads."""
    window_rows: tuple[int, ...] = (4, 7, 14)
    """Rows over which a thread walks, where the image has a multiple of them."""
    max_walked_products: int = 72
    """Products of a thread in each row of such a walk: eight results of windows of 3 x 3. Over those of 7 x 7 Triton
    takes minutes, for what they keep from row to row."""
    max_kept_walks: int = 2
    """Blocks whose threads walk, of one number of results side by side."""
    max_kept_windows: int = 4
    """Proposals of windows that are kept of one number of results and lines: blocks along lines."""
    max_kept_across: int = 2
    """The same of blocks across lines."""
    max_kept: int = 40
    """Proposals that are kept: each takes a second or two to build."""
    max_alike: int = 2
    """Proposals that are kept of one tile of the result and of the sum."""


PROPOSALS = ProposalChoices()


@dataclass(frozen=True, slots=True)
class OtherBlockLimits:
    """Other blocks of a loop with products, to be timed beside those that the model prefers."""

    max_kept: int = 6
    """How many: each takes a second or two to build."""
    max_modelled_ratio: float = 1.5
    """Times the modelled seconds of the fastest that others may take."""


OTHER_BLOCKS = OtherBlockLimits()


@dataclass(frozen=True, slots=True)
class RowSumChoices:
    """Other blocks for sums of long rows, to be timed beside the usual one."""

    min_bytes: int = 4 << 20
    """What a kernel moves at least: of less the launch is most."""
    rows: tuple[int, ...] = (2, 4)
    pieces: tuple[int, ...] = (1024, 2048)
    """Elements of a row that a block takes at a time."""
    thread_bytes_of_pieces: int = 128
    """Bytes of an operand that a thread holds: of 40 blocks each for eight products of halves these were fastest where
    rows are long, by up to 1.6 times (H200, console)."""
    max_whole: int = 4096
    """A row that is taken at once."""
    thread_bytes_of_rows: int = 64
    """Bytes of an operand that a thread holds of such rows."""


ROW_SUMS = RowSumChoices()


@dataclass(frozen=True, slots=True)
class SpecialisedChoices:
    """Schedules of a loop over keys whose warps are specialised, to be timed beside the usual one."""

    rows: int = 128
    """Rows of a block: a strip for each of two warp groups."""
    keys: tuple[int, ...] = (128, 64)
    """Keys of a step."""
    slots: tuple[int, ...] = (4, 3, 2)
    """Buffers of the rings of keys and of values; the first number that shared memory holds is taken."""
    max_strips: int = 2
    """Warp groups that compute: registers hold the scores and results of no more."""
    max_copied_columns: int = 128
    """Columns of results that have a buffer in shared memory beside the rings."""
    loading_registers: int = 24
    """Of a thread of the warp that loads."""
    computing_registers: int = 240
    """Of a thread that computes: two warp groups, and the warp that loads, have all registers of a core."""
    max_spilled_bytes: int = 32
    """Of a thread: a few scalars of the loops around. A kernel that spills more is refused when it is built."""


SPECIALISED = SpecialisedChoices()


@dataclass(frozen=True, slots=True)
class BuildAttempts:
    """What is built again because a compiler or a device refused it."""

    max_kernel_attempts: int = 4
    """How often a kernel is built until it fits the shared memory."""
    max_refusal_probes: int = 32
    """How many builds at most find out which kernels of a library are refused."""
    least_own_weight_elements: int = 1024
    """Of a weight for which the library of our own routines is built while its program is traced."""
    max_graph_attempts: int = 4
    """How often a graph is compiled again without the kernels that were refused."""


BUILDING = BuildAttempts()


@dataclass(frozen=True, slots=True)
class VerificationLimits:
    """Differences that rounding explains where every step is verified."""

    max_rule_ratio: float = 4.0
    """Times the rule's k up to which rounding explains a difference."""
    max_roundings: float = 8.0
    """Roundings of the largest result up to which rounding explains a difference."""


VERIFICATION = VerificationLimits()


@dataclass(frozen=True, slots=True)
class BisectionLimits:
    """The search for a wrong step."""

    rounding_ratio: float = 1e-2
    """Relative differences below this are rounding: the same call of the same library."""
    rule_samples: int = 16
    """Assignments of numbers that an application is tried on."""
    max_excess_ratio: float = 1e6
    """An error of more than this many times what is allowed is as good as infinite."""


BISECTION = BisectionLimits()


@dataclass(frozen=True, slots=True)
class InPlaceLimits:
    """Writes into inputs where they lie."""

    max_followed_reads: int = 256
    """Elements whose makers are looked up to find what a stored element is made of; beyond, the write copies."""


IN_PLACE = InPlaceLimits()


@dataclass(frozen=True, slots=True)
class LoweringLimits:
    """Programs that are written for a kernel."""

    max_copied_nodes: int = 1536
    """Nodes of expressions times the pieces of loops in which they are written, up to which loops are cut where
    conditions change. A function of 4,500 lines of C++, 36 copies of two tiles, took its compiler over five minutes,
    one of 12 copies still most of one (console)."""


LOWERING = LoweringLimits()
