"""What is refused or left to eager because it is too large, and what a run may keep or take: nodes, bytes, seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelFileLimits:
    """Model files: what is refused, and what is computed when they are read."""

    max_nodes: int = 1_000_000
    """Nodes of a model, those of its functions and bodies counted at each use."""
    max_depth: int = 64
    """Levels to which functions and bodies nest."""
    max_unrolled_steps: int = 4096
    """Steps of a loop that are recorded one by one while a graph is captured."""
    max_small_constant_elements: int = 16
    """Elements of a constant of integers that is taken for numbers of the host in a loop."""
    min_opset: int = 7
    """The oldest version of the operators that is read."""
    max_model_bytes: int = (1 << 31) - 1
    """Bytes of a model: what protobuf reads as one message."""
    max_shape_product: int = 1 << 60
    """The product of a shape's sizes, those of 0 left out: strides beyond it overflow."""
    max_inspected_initialiser_bytes: int = 1024
    """Initialisers of more bytes are not looked into where only types count."""
    max_scale_denominator: int = 1 << 20
    """The largest denominator of a scale that is taken for a ratio of integers."""
    max_host_elements: int = 1024
    """A host operation with more elements than this is left to tensors."""
    max_host_constant_elements: int = 64
    """A constant with more elements than this is never treated as a host value."""
    max_tensor_elements: int = 1 << 36
    """A requested tensor with more elements is refused before it is allocated."""
    max_folded_bytes: int = 16 << 20
    """Bytes of a constant that is computed when the model is read, and of what it is computed from."""


MODEL_FILES = ModelFileLimits()


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Models and values that are too large to be looked at."""

    max_file_nodes: int = 20_000
    """A model of more nodes runs eagerly: compiling it would take minutes."""
    max_timed_region_bytes: int = 4 << 30
    """Bytes of a region's operands and results up to which it is timed."""
    max_assumed_tensor_elements: int = 1 << 40
    """No tensor has more elements."""
    max_mask_elements: int = 1 << 26
    """Elements of a frozen mask that is looked at; a larger one stays."""
    max_folded_elements: int = 1 << 16
    """Elements that a folded result may have even if its inputs have fewer."""


MODELS = ModelLimits()


@dataclass(frozen=True, slots=True)
class LibraryFaults:
    """Where calls of libraries are known to be wrong."""

    cudnn_key_tile: int = 128
    """Keys that cuDNN's gradient of attention takes at once: where half of them are left over it may be NaN (pytorch
    issue 196678)."""


LIBRARY_FAULTS = LibraryFaults()


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """Loops whose steps are not known before."""

    max_steps: int = 1_000_000
    """Steps of a loop without a trip count; one that goes on is taken for one without end."""
    first_step_room: int = 16
    """Steps for which there is room at first where their number is not known; it doubles."""


LOOP_LIMITS = LoopLimits()


@dataclass(frozen=True, slots=True)
class PieceLimits:
    """How much is computed at a time, so that memory holds it."""

    compared_weight_elements: int = 1 << 16
    """Elements of a weight that are compared at a time."""
    evaluated_points: int = 1 << 22
    """Evaluations of a body that are held at once; larger grids are cut."""
    max_exact_elements: int = 1 << 23
    """Elements that are evaluated at once in exact arithmetic; more are refused."""
    interpreted_grid_points: int = 256
    """Grid points that run in step."""
    mask_rows: int = 64
    """Rows of a mask that are compared at a time, and rows of which a first look takes some elements."""
    scaled_weight_elements: int = 1 << 18
    """Elements of a weight that are scaled at a time."""


PIECES = PieceLimits()


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """Graphs that are compiled and kept for one program."""

    max_per_code_object: int = 1 << 14
    """Graphs that may be compiled from one code object."""
    max_per_piece: int = 16
    """Graphs that are compiled for one piece, where sizes that matter keep changing; then it runs eagerly."""
    max_short_ways: int = 512
    """Short ways kept per model."""
    max_known_calls: int = 4
    """Calls per model that native functions are kept for, each of which is asked whether it serves the next one."""
    max_held_objects: int = 20_000
    """Objects that a program holds and that are looked at for the tensors of a call; one with more has no short way."""


GRAPHS = GraphLimits()


@dataclass(frozen=True, slots=True)
class CudaGraphLimits:
    """Graphs of launches that are kept."""

    max_plan_sizes: int = 8
    """Sizes of one plan that get a graph."""
    max_recaptures: int = 4
    """Times that a graph is captured again because what it reads in place has moved."""
    max_training_misses: int = 8
    """Calls of a pass of training, one after another, that find inputs elsewhere before its graph is captured
    again."""
    max_chunk_steps: int = 64
    """Steps of the longest graph that serves any number of steps."""
    max_full_graph_steps: int = 1024
    """Steps up to which a loop whose steps are counted beforehand is one graph (if `max_chunk_bytes` allow)."""
    max_chunk_bytes: int = 1 << 28
    """Bytes of slices and stacked results that one graph of a loop may hold."""
    max_loop_sizes: int = 4
    """Sets of sizes of one loop that keep graphs."""


CUDA_GRAPHS = CudaGraphLimits()


@dataclass(frozen=True, slots=True)
class KeptMemoryLimits:
    """Memory that is kept between calls, and how it is laid out."""

    max_lasting_result_bytes: int = 1 << 20
    """Results of calls that nobody sees outside and that are not larger keep their memory from call to call."""
    max_gpu_workspace_bytes: int = 1 << 30
    """Bytes of a GPU's workspace that is kept between calls."""
    max_streams: int = 32
    """Streams that memory is kept for, per size table."""
    cpu_alignment_bytes: int = 64
    """What lies in an arena begins at multiples of this many bytes on a CPU."""
    gpu_alignment_bytes: int = 256
    """What lies in an arena begins at multiples of this many bytes on a GPU."""
    max_size_tables: int = 256
    """Size tables kept per executable."""
    max_size_changes: int = 64
    """Sets of sizes that change together of which a plan keeps what must be done again."""
    max_small_arena_bytes: int = 1 << 16
    """Bytes between kernels that every size table may keep."""
    arena_growth_parts: int = 8
    """The part by which buffers may grow before their memory between steps is packed again, where it is small."""
    max_workspace_bytes: int = 1 << 28
    """Bytes of a workspace that is kept between calls."""


KEPT_MEMORY = KeptMemoryLimits()


@dataclass(frozen=True, slots=True)
class BuildLimits:
    """Compilers that run."""

    max_cpp_seconds: float = 300.0
    """Seconds that the C++ compiler may take."""
    max_probe_seconds: float = 60.0
    """Seconds that a compiler may take to say what it is."""
    max_triton_seconds: float = 300.0
    """Seconds that Triton may take for one kernel."""
    max_timed_triton_seconds: float = 30.0
    """Seconds of a processor that Triton may take for one that is only timed. Most take two; its passes over layouts
    have taken two minutes and more over long loops that are written out."""
    max_triton_workers: int = 16
    """Processes that build kernels of Triton side by side."""


BUILD_LIMITS = BuildLimits()


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """The store of what was built."""

    max_lock_seconds: float = 60.0
    """Seconds that a process waits for another one that makes the same entry."""
    max_bytes: int = 2 << 30
    """Bytes of a store; beyond them what is unused for longest goes."""
    max_unfinished_seconds: float = 3600.0
    """Seconds after which what a process left unfinished is removed."""


STORE = StoreLimits()


@dataclass(frozen=True, slots=True)
class TuningFileLimits:
    """Tuning files that others may have written."""

    max_bytes: int = 64 << 20
    """Bytes of one that is read: an entry has some hundred."""


TUNING_FILES = TuningFileLimits()


@dataclass(frozen=True, slots=True)
class ExampleLimits:
    """Sizes that are tried where none are given."""

    undeclared_sizes: tuple[tuple[int, int], ...] = ((2, 64), (2, 224), (1, 64), (1, 1))
    """Sizes of undeclared dims, the first and the others, where nobody gave inputs."""
    leading_sizes: tuple[int, ...] = (1, 2, 4)
    """Of leading dims, where a model takes none of those."""
    other_sizes: tuple[int, ...] = (1, 2, 3, 4, 8, 16, 32, 48, 80, 96, 128, 256, 320, 512, 640)
    """Of other dims."""
    max_search_seconds: float = 10.0
    """For how long sizes that fit are looked for."""


EXAMPLES = ExampleLimits()


@dataclass(frozen=True, slots=True)
class ArtifactLimits:
    """Artifacts: what is refused before it is read."""

    max_header_bytes: int = 16 << 20
    """Bytes of the table of sections."""
    max_text_bytes: int = 1 << 30
    """Bytes of one section that is read as JSON."""
    max_sections: int = 1 << 18
    """Sections of one file."""
    max_depth: int = 200
    """Levels to which values in JSON nest."""
    max_expression_nodes: int = 1 << 14
    """Parts of one expression in a file that nobody vouches for."""
    max_expression_written: int = 1 << 20
    """Parts of one expression in a file, where a shared part counts as often as it is used: what goes through an
    expression as a tree takes so many steps."""
    max_parts_below: int = 1 << 25
    """Parts below the parts of all expressions in a file, summed: so many are listed when each is walked through."""
    max_fraction_digits: int = 1100
    """Digits of the parts of an exact number: those of any float64 are fewer."""
    max_spread_bytes: int = 64 << 20
    """Bytes by which the tensors of a file that nobody vouches for may be larger than what it holds of them."""
    max_rank: int = 64
    """Dims of a tensor: torch has no more."""
    max_graphs: int = 64
    """Graphs of one file."""
    hashed_at_once_bytes: int = 4 << 20
    """Sections of more bytes are hashed side by side."""
    max_kept_capture_bytes: int = 256 << 20
    """A model file of more bytes is captured anew by each process: its weights would fill the store."""
    max_key_seconds: float = 1.0
    """Seconds that a process waits for a key that another one is about to make."""


ARTIFACTS = ArtifactLimits()


@dataclass(frozen=True, slots=True)
class ProgramFileLimits:
    """Files of exported programs: what torch's loader is not asked to evaluate."""

    max_expression_characters: int = 100_000
    """Characters of one size or guard."""
    max_exponent: int = 64
    """Exponents, and bits by which numbers are shifted."""
    max_number: int = 1 << 64
    """Numbers in sizes."""


PROGRAM_FILES = ProgramFileLimits()
