"""Cross-overs: from which size, share or gain on one way is taken to be faster than another.

In: `cpu.json`, `gpu.json` and `common.json`, named after the code that reads them. Each number there has a unit, a
sentence that says why, and a source: the file of results that shows it, a fact, or why it was guessed
(`load.SOURCES`). `python -m benchmarks.thresholds` measures those of a CPU. Out: one frozen record for each idea, read
once when this file is imported.
"""

from __future__ import annotations

from dataclasses import dataclass

from .load import load


@dataclass(frozen=True, slots=True)
class ContractionThresholds:
    """Where a contraction is work for matrix units; read all over form and schedule."""

    min_block_side: int


CONTRACTION = load(ContractionThresholds, "contraction")


@dataclass(frozen=True, slots=True)
class SizeThresholds:
    """What unknown sizes are taken for, and which values are large or nothing beside others."""

    unseen_size: int
    min_largest_tensor_elements: int
    assumed_size: int
    data_size: int
    min_growth_ratio: int
    min_negligible_ratio: int


SIZES = load(SizeThresholds, "sizes")


@dataclass(frozen=True, slots=True)
class LoopThresholds:
    """Loops of a program: which are written out step by step."""

    max_gathered_elements: int
    max_lifted_growth_ratio: int
    max_unrolled_steps: int
    max_known_unrolled_steps: int


LOOPS = load(LoopThresholds, "loops")


@dataclass(frozen=True, slots=True)
class InterpreterThresholds:
    """Exact arithmetic."""

    max_python_power_elements: int


INTERPRETER = load(InterpreterThresholds, "interpreter")


@dataclass(frozen=True, slots=True)
class TensorThresholds:
    """How ops over several tensors are written."""

    max_pieces_in_a_row: int


TENSORS = load(TensorThresholds, "tensors")


@dataclass(frozen=True, slots=True)
class MaskThresholds:
    """Masks, frozen or made of data: when windows and lists of tiles pay."""

    min_listed_tiles: int
    min_mask_elements: int
    max_progression_elements: int
    min_times_as_long: int
    min_times_as_large: int


MASKS = load(MaskThresholds, "masks")


@dataclass(frozen=True, slots=True)
class CascadeThresholds:
    """Long rows of a cascade in parts."""

    min_part_elements: int
    part_multiple: int
    min_cores_per_row: int
    min_gain_ratio: float


SPLIT_CASCADES = load(CascadeThresholds, "split_cascades")


@dataclass(frozen=True, slots=True)
class MomentThresholds:
    """Means and spreads in parts."""

    max_row_part_elements: int
    min_column_part_rows: int
    min_run_elements: int
    min_unsplit_rows_per_core: int
    part_multiple: int


SPLIT_MOMENTS = load(MomentThresholds, "split_moments")


@dataclass(frozen=True, slots=True)
class SplitThresholds:
    """When a reduction over much with few results becomes two, on a kind of processor."""

    min_axis_extent: int
    min_part_elements: int
    min_part_extent: int
    max_results: int
    part_multiple: int
    min_gain_of_waiting_ratio: float


CPU_SPLITS = load(SplitThresholds, "cpu_splits")
GPU_SPLITS = load(SplitThresholds, "gpu_splits")


@dataclass(frozen=True, slots=True)
class RowChunkThresholds:
    """Chunks of rows that a thread holds."""

    rows: int
    even_multiple: int
    odd_multiple: int


ROW_CHUNKS = load(RowChunkThresholds, "row_chunks")


@dataclass(frozen=True, slots=True)
class OneDnnThresholds:
    """When packed products and convolutions of the library pay."""

    min_packed_product_work: int
    min_plain_product_work: int
    min_plain_rows: int
    max_unblocked_taps: int
    assumed_image_side: int
    max_sum_chain: int


ONEDNN = load(OneDnnThresholds, "onednn")


@dataclass(frozen=True, slots=True)
class LibraryThresholds:
    """What calls of libraries cost, and when they are made."""

    min_unkept_bytes: int
    reached_peak_ratio: float
    min_attention_queries: int
    max_flash_width: int
    other_attention_rate_ratio: float
    max_generated_step_work: int
    work_per_chained_instruction: int
    max_gathering_rows: int
    min_vector_channels: int


LIBRARY = load(LibraryThresholds, "library")


@dataclass(frozen=True, slots=True)
class PartitionThresholds:
    """Which ops share a kernel, and when kernels take the place of library calls."""

    min_gain_over_library_ratio: float
    max_value_memory_ratio: float
    min_cascade_part_elements: int
    max_rows_per_core_in_parts: int
    max_brief_seconds: float
    min_launch_saving_ratio: float
    max_kernel_ops: int
    min_stored_instructions: int
    max_recomputed_ops: int
    max_unstored_growth_ratio: float
    min_spared_ratio: int


PARTITION = load(PartitionThresholds, "partition")


@dataclass(frozen=True, slots=True)
class RegionThresholds:
    """Which contractions start a region, and what belongs to it."""

    max_skinny_rows: int
    min_skinny_operand_elements: int
    max_sum_length: int
    max_times_smaller: int
    max_recomputed_sources: float


REGIONS = load(RegionThresholds, "regions")


@dataclass(frozen=True, slots=True)
class StoreThresholds:
    """Which values of a region may be stored between its kernels."""

    max_small_elements: int


REGION_STORES = load(StoreThresholds, "region_stores")


@dataclass(frozen=True, slots=True)
class MemoryThresholds:
    """Buffers."""

    min_lazy_buffer_bytes: int
    min_reused_bytes: int


MEMORY = load(MemoryThresholds, "memory")


@dataclass(frozen=True, slots=True)
class ListThresholds:
    """Kernels that are one launch."""

    min_kernels: int
    max_list_operands: int
    max_made_bytes: int


LISTS = load(ListThresholds, "lists")


@dataclass(frozen=True, slots=True)
class FormThresholds:
    """Rewrites of a form."""

    max_exponent_factors: int
    max_tanh_factor: int
    max_packed_rows: int
    max_block_rows: int
    max_taps_at_once: int
    max_unrolled_taps: int
    max_line_elements: int
    max_part_elements: int
    min_part_elements: int
    max_part_sum_elements: int
    max_sum_parts: int
    max_mixed_heads: int


FORMS = load(FormThresholds, "forms")


@dataclass(frozen=True, slots=True)
class LoweringThresholds:
    """What a program holds instead of computing it again."""

    min_held_cost: int


LOWERING = load(LoweringThresholds, "lowering")


@dataclass(frozen=True, slots=True)
class SumThresholds:
    """How long chains of additions may be, and how many levels a sum has."""

    min_tree_elements: int
    min_two_level_lanes: int
    max_single_chain: int
    max_lane_chain: int
    min_wide_step_elements: int
    max_chain: int


SUM_LEVELS = load(SumThresholds, "sum_levels")


@dataclass(frozen=True, slots=True)
class CpuCostThresholds:
    """The modelled time of a kernel on a CPU."""

    strided_instructions: int
    overlapping_points: int
    instructions_per_second: float


CPU_COST = load(CpuCostThresholds, "cpu_cost")


@dataclass(frozen=True, slots=True)
class CpuVectorThresholds:
    """Tasks and steps of kernels without products."""

    task_elements: int
    max_task_row_elements: int
    max_states: int
    max_rows_side_by_side: int
    max_idle_ratio: float
    min_rows_from_memory: int
    transposed_side: int
    turned_rows_and_columns: tuple[int, ...]
    min_large_tasks_per_core: int
    min_scratch_cost: int


CPU_VECTORS = load(CpuVectorThresholds, "cpu_vectors")


@dataclass(frozen=True, slots=True)
class CpuMatmulThresholds:
    """Blocks of products on vector units."""

    max_lane_registers: int
    max_rows: int
    streamed_step_elements: int
    max_summed_step_elements: int
    max_chain: int
    max_untiled_extent: int


CPU_MATMUL = load(CpuMatmulThresholds, "cpu_matmul")


@dataclass(frozen=True, slots=True)
class GpuBlockThresholds:
    """Blocks of threads that the table of blocks does not know, and what holds for all."""

    begin_multiple: int
    min_contiguous_extent: int
    max_gathered_step: int
    accesses_per_thread: int
    usual_warps: int
    square_side: int
    enough_contiguous_elements: int
    usual_stages: int
    min_elements_per_thread: int
    max_chain: int
    max_early_release_bytes: int


GPU_BLOCKS = load(GpuBlockThresholds, "gpu_blocks")


@dataclass(frozen=True, slots=True)
class GpuRowThresholds:
    """Rows that a block holds or streams."""

    max_resident_elements: int
    bucket_lengths: tuple[int, ...]
    min_times_shorter: int
    choosing_shrink_ratio: int
    assumed_length: int
    assumed_streamed_length: int
    max_hoisted_bytes_per_thread: int


GPU_ROWS = load(GpuRowThresholds, "gpu_rows")


@dataclass(frozen=True, slots=True)
class GpuColumnThresholds:
    """Reductions across rows."""

    row_bytes: int
    step_rows: int
    odd_columns: int
    max_resident_rows: int
    deep_step_rows: int
    max_deep_steps: int
    min_row_bytes: int


GPU_COLUMNS = load(GpuColumnThresholds, "gpu_columns")


@dataclass(frozen=True, slots=True)
class GpuCostThresholds:
    """The modelled time and shared memory of a kernel on a GPU."""

    loads_per_choice: int
    min_copy_bytes: int
    max_copy_bytes: int
    descriptor_granule_bytes: int
    line_bytes: int
    row_fold_seconds: float
    window_step_seconds: float
    window_element_seconds: float
    window_loss_ratio: float
    window_load_instructions: int
    window_thread_instructions: int
    max_window_bytes: int
    window_thread_registers: int
    max_waiting_warps: int


GPU_COST = load(GpuCostThresholds, "gpu_cost")


@dataclass(frozen=True, slots=True)
class GpuMatmulThresholds:
    """Blocks of products on matrix units."""

    max_untiled_extent: int
    max_held_extent: int
    other_registers: int
    max_registers: int
    piece_bytes: int
    split_register_bytes: int
    piece_products: int
    warp_group_rows: int
    warp_group_warps: int
    max_warp_group_columns: int
    merge_bytes: int
    step_seconds: float
    reached_without_units_ratio: float
    half_rate_columns: int
    warp_rows: int
    warp_elements: int
    short_rows_rate_ratio: float
    overlap_loss_ratio: float
    read_over_copy_ratio: float
    operand_read_ratio: float
    gathered_operations: int
    copy_operations: int
    descriptor_latencies: float
    merge_seconds: float
    running_operations: int
    gathered_registers: float
    max_unpacked_ratio: float
    max_modelled_ratio: float
    max_tabled_size_ratio: float
    max_unproposed_ratio: float
    min_arriving_ratio: float
    min_stored_run_elements: int


GPU_MATMUL = load(GpuMatmulThresholds, "gpu_matmul")


@dataclass(frozen=True, slots=True)
class SkinnyMatmulThresholds:
    """Products of few rows, which are summed."""

    max_rows: int
    block_product_elements: int
    block_matrix_elements: int
    min_step_elements: int


SKINNY_MATMUL = load(SkinnyMatmulThresholds, "skinny_matmul")


@dataclass(frozen=True, slots=True)
class CppThresholds:
    """How C++ is written."""

    max_levels_from_outside: int
    max_repeated_index_nodes: int
    max_inline_tree_registers: int
    max_unrolled_registers: int
    max_unrolled_squares: int
    min_kernels_per_unit: int


CPP_TEXT = load(CppThresholds, "cpp_text")
