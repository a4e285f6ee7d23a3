"""Which ops a graph of unknown origin may call: torch's own that compute new tensors of tensors and numbers, and that
look at what they are given before they touch memory.

The list is closed. That an op writes into nothing by its schema says little: torch has ops that scatter to places from
data without a look at them (gradients of poolings), that read as many elements as another operand says (statistics of
a batch norm, values of an attention), that write into operands all the same (running statistics), that give memory as
they find it, and those of TorchScript that set seeds and modes."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
import operator
from collections.abc import Iterator

import torch
from torch import fx
from torch._C import _dispatch_has_kernel, _dispatch_has_kernel_for_dispatch_key
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator, OpOverload

from tilewright.capture.in_place import OverFirst, over_first

from .operands import BAGS, RELYING, fits

__all__ = [
    "OverFirst", "gives_memory_as_found", "is_safe_op", "may_run", "names_no_file", "over_first", "takes_only_numbers",
    "unknown_calls", "unknown_calls_given", "with_growing_offsets", "without_found_memory",
]  # fmt: skip

_NAMESPACES = frozenset({"aten", "prims"})
_POINTWISE = """
__lshift__ __rshift__ abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2
arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
bitwise_xor ceil celu clamp clamp_max clamp_min clip complex conj conj_physical copysign cos cosh deg2rad digamma div
divide elu eq erf erfc erfinv exp exp2 expm1 fix float_power floor floor_divide fmax fmin fmod frac frexp gcd ge gelu
greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac imag isclose
isfinite isinf isnan isneginf isposinf isreal lcm ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p log2
log_sigmoid log_sigmoid_forward logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt
masked_fill maximum minimum mish mul multiply mvlgamma nan_to_num ne neg negative nextafter not_equal polar polygamma
positive pow _prelu_kernel prelu rad2deg real reciprocal relu relu6 remainder resolve_conj resolve_neg round rsqrt rsub
selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square sub subtract tan tanh threshold
true_divide trunc where xlogy convert_element_type special_airy_ai special_bessel_j0 special_bessel_j1
special_bessel_y0 special_bessel_y1 special_digamma special_entr special_erf special_erfc special_erfcx special_erfinv
special_exp2 special_expit special_expm1 special_gammainc special_gammaincc special_gammaln special_i0 special_i0e
special_i1 special_i1e special_log1p special_log_ndtr special_logit special_modified_bessel_i0
special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_multigammaln special_ndtr
special_ndtri special_polygamma special_psi special_round special_scaled_modified_bessel_k0
special_scaled_modified_bessel_k1 special_sinc special_spherical_bessel_j0 special_xlog1py special_xlogy special_zeta
bessel_i0e bessel_i1 bessel_i1e bessel_j0 bessel_j1 cbrt erf_inv erfcx ndtri spherical_bessel_j0 zeta
shift_left shift_right_arithmetic
"""
_REDUCTIONS = """
all allclose amax amin aminmax any argmax argmin cdist _cdist_forward count_nonzero cov corrcoef cummax cummin cumprod
cumsum cumulative_trapezoid dist equal frobenius_norm kthvalue linalg_vector_norm _log_softmax log_softmax
logcumsumexp logsumexp max mean median min mode nanmean nanmedian nanquantile nansum norm nuclear_norm
pairwise_distance pdist prod quantile _safe_softmax _softmax softmax special_log_softmax special_logsumexp
special_softmax std std_mean sum sum_to_size trace trapezoid trapz var var_mean cosine_similarity renorm
native_group_norm native_layer_norm group_norm layer_norm
"""
_PRODUCTS = """
addbmm addmm addmv addr baddbmm bilinear bmm chain_matmul _convolution conv1d conv2d conv3d conv_transpose1d
conv_transpose2d conv_transpose3d convolution cross dot einsum ger inner kron linear matmul mm mv outer tensordot vdot
"""
_ALGEBRA = """
cholesky cholesky_inverse cholesky_solve det inverse linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cross
linalg_det linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex
linalg_ldl_factor linalg_ldl_factor_ex linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_matmul
linalg_matrix_exp linalg_matrix_norm linalg_matrix_power linalg_matrix_rank linalg_multi_dot linalg_norm linalg_pinv
linalg_qr linalg_slogdet linalg_solve linalg_solve_ex linalg_solve_triangular linalg_svd linalg_svdvals
linalg_tensorinv linalg_tensorsolve linalg_vander linalg_vecdot logdet matrix_exp matrix_power orgqr pinverse qr
slogdet svd triangular_solve vander
fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn
fft_ifftshift fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftfreq
fft_rfftn stft istft
"""
_PLACES = """
argsort bincount bucketize cartesian_prod combinations embedding gather histc index index_add index_copy index_fill
index_put index_reduce index_select isin masked_scatter masked_select msort nonzero nonzero_numpy nonzero_static
one_hot put repeat_interleave scatter scatter_add scatter_reduce searchsorted sort take take_along_dim topk
unique_consecutive unique_dim unique_dim_consecutive _unsafe_index
"""
_VIEWS = """
adjoint alias alias_copy argwhere atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors broadcast_to cat
channel_shuffle chunk clone column_stack concat concatenate constant_pad_nd contiguous copy detach detach_copy diag
diag_embed diagflat diagonal diagonal_copy diagonal_scatter diff dsplit dstack expand expand_as expand_copy flatten flip
fliplr flipud hsplit hstack im2col col2im lift_fresh lift_fresh_copy mH mT matrix_H meshgrid moveaxis movedim narrow
narrow_copy numpy_T pad _pad_circular pad_sequence permute permute_copy pixel_shuffle pixel_unshuffle ravel
reflection_pad1d reflection_pad2d reflection_pad3d repeat replication_pad1d replication_pad2d replication_pad3d reshape
reshape_as roll rot90 row_stack select select_copy select_scatter slice slice_copy slice_inverse slice_scatter split
split_copy split_with_sizes split_with_sizes_copy squeeze squeeze_copy stack swapaxes swapdims t t_copy tensor_split
tile to _to_copy transpose transpose_copy tril tril_indices triu triu_indices type_as unbind unbind_copy unflatten
unfold unfold_copy unsafe_chunk unsafe_split unsafe_split_with_sizes _unsafe_view unsqueeze unsqueeze_copy view view_as
view_as_complex view_as_complex_copy view_as_real view_as_real_copy view_copy vsplit vstack
"""
_WINDOWS = """
_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool1d
max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool2d max_unpool3d
upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
"""
_MADE = """
arange bartlett_window blackman_window eye fill full full_like hamming_window hann_window iota
kaiser_window linspace logspace new_full new_ones new_zeros ones ones_like range scalar_tensor zero zeros
zeros_like bernoulli dropout alpha_dropout feature_alpha_dropout feature_dropout exponential geometric log_normal
multinomial native_dropout normal normal_functional rand rand_like randint randint_like randn randn_like random
randperm uniform cauchy
"""
_LOSSES = """
binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss hinge_embedding_loss
huber_loss kl_div l1_loss margin_ranking_loss mse_loss nll_loss nll_loss2d nll_loss2d_forward nll_loss_forward
nll_loss_nd poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
"""
_TOLD = """
item is_nonzero numel size stride storage_offset sym_numel sym_size sym_stride sym_storage_offset _assert_scalar
_assert_tensor_metadata _assert_async sym_constrain_range sym_constrain_range_for_size
"""
_SAFE = frozenset(
    name
    for names in (
        _POINTWISE, _REDUCTIONS, _PRODUCTS, _ALGEBRA, _PLACES, _VIEWS, _WINDOWS, _MADE, _LOSSES, _TOLD,
    )
    for name in names.split()
)  # fmt: skip
_BY_PLACE = frozenset({"as_strided", "as_strided_copy", "as_strided_scatter"})
"""Ops that address the storage of their operand, whatever else lies in it."""
_OF_PROGRAMS = frozenset(
    """
_conj _conj_physical _fft_c2c _fft_c2r _fft_r2c _int_mm _linalg_det
_linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd _local_scalar_dense _pdist_forward _trilinear _unique2
_unsafe_index_put _unsafe_masked_index affine_grid_generator
fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask fractional_max_pool2d
fractional_max_pool3d geqrf glu grid_sampler_2d grid_sampler_3d histogram lu_unpack ormqr rms_norm _fused_rms_norm
rrelu_with_noise_functional special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he special_laguerre_polynomial_l
special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
""".split()
)
"""Ops that composites are made of, or that files of programs hold besides."""
_WRITING = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
"""Ops that write running statistics, which their schemas do not say."""
_OF_FAKES = RELYING - _WRITING
"""Ops that are safe in a graph that was traced here with the operands that it will have: these show that they fit."""
_MEMORY_AS_FOUND = frozenset(
    "empty empty_like empty_permuted empty_strided new_empty new_empty_strided".split()
)
_CONTROL = frozenset(
    """
associative_scan cond flex_attention invoke_subgraph map map_impl run_with_rng_state scan tag_activation_checkpoint
tilewright_loop while_loop with_effects wrap_activation_checkpoint wrap_with_autocast wrap_with_set_grad_enabled
""".split()
)
"""What runs graphs and ops that stand in the same program, and does nothing else."""
_OF_PYTHON = frozenset({"quantized_decomposed", "torch_nn"})
"""Namespaces whose ops are functions of Python over torch's own ops."""
_OF_OTHERS = frozenset({"torchvision::nms"})
"""Ops of other packages whose source was read."""
_TYPES = frozenset({
    "Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]", "int", "SymInt", "float", "bool", "number",
    "str", "Device", "Optional[Device]", "Optional[str]", "Optional[int]", "Optional[float]", "Optional[bool]",
    "Optional[number]", "Optional[SymInt]", "List[int]", "List[SymInt]", "List[float]", "List[bool]",
    "Optional[List[int]]", "Optional[List[SymInt]]", "Optional[List[float]]", "List[number]", "Optional[Generator]",
    "Generator",
})  # fmt: skip
"""Types of what an op may be given: a graph has no value of the others."""
_OF_NUMBERS: frozenset[object] = frozenset(
    [getattr(operator, name) for name in (
        "abs add and_ eq floordiv ge getitem gt invert le lshift lt mod mul ne neg not_ or_ pos pow rshift sub"
        " truediv xor"
    ).split()]
    + [f for name, f in vars(math).items() if callable(f) and not name.startswith("_")]
)  # fmt: skip
"""Functions of numbers, as sizes are computed."""
_NUMBERS = frozenset(
    {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.getitem}
)


def is_safe_op(function: object, *, apart: bool = False) -> bool:
    """Whether a call of it does nothing but compute, and is checked by torch. `apart`: each operand has a storage of
    its own, so that ops that address storages reach nothing else."""
    if not isinstance(function, OpOverload):
        return any(function is f for f in _NUMBERS)
    schema, name = function._schema, function._opname
    if (
        schema.is_mutable
        or function.namespace not in _NAMESPACES
        or not _dispatch_has_kernel(function.name())
    ):
        return False  # what has no kernel is of TorchScript alone: numbers and texts, modes, seeds
    listed = name in _SAFE or (apart and name in _BY_PLACE)
    return listed and all(str(a.type) in _TYPES for a in schema.arguments)


def names_no_file(op: OpOverload) -> bool:
    """Whether no argument of an op is the name of a file, or could be: torch's own ops take other texts too. (What has
    no kernel is of TorchScript alone.)"""
    if not _dispatch_has_kernel(op.name()):
        return False
    if op.namespace in _NAMESPACES:
        return op._opname != "from_file"
    return not any("str" in str(a.type) for a in op._schema.arguments)


def takes_only_numbers(function: object) -> bool:
    """Whether a function computes with numbers, and would do other things with texts and lists."""
    return any(function is f for f in _NUMBERS if f is not operator.getitem)


def unknown_calls(gm: fx.GraphModule) -> Iterator[str]:
    """What a functional graph, traced here of a program that nobody vouches for, calls that may do more than compute:
    read or write past its operands, or call what is no op."""
    for target in _targets(gm):
        if not _is_known(target):
            yield str(target)
    yield from (str(node.target) for node in _relying(gm) if not _fits(node))


def unknown_calls_given(gm: fx.GraphModule) -> Iterator[str]:
    """The same of a graph as somebody wrote it, which torch runs: writes into operands and composites stand there too,
    and are as safe as what they are made of."""
    for target in _targets(gm):
        if not _is_known(target) and not (isinstance(target, OpOverload) and _is_made_of_others(target)):
            yield str(target)


def may_run(op: OpOverload) -> bool:
    """Whether torch may run an op, with operands that fit, of a program that nobody vouches for."""
    return op._opname not in BAGS and (op._opname in _WRITING or _is_known(op) or _is_made_of_others(op))


def gives_memory_as_found(op: OpOverload) -> bool:
    """Whether an op's results hold what lay in memory before."""
    return op._opname in _MEMORY_AS_FOUND


def without_found_memory(gm: fx.GraphModule) -> None:
    """Let memory that ops of a graph give as they find it be zeros: others would learn what lay there."""
    for part in (m for m in gm.modules() if isinstance(m, fx.GraphModule)):
        for node in list(part.graph.nodes):
            if isinstance(node.target, OpOverload) and node.target._opname in _MEMORY_AS_FOUND:
                with part.graph.inserting_after(node):
                    zeros = part.graph.call_function(torch.ops.aten.zeros_like.default, (node,))
                zeros.meta = dict(node.meta)
                node.replace_all_uses_with(zeros, delete_user_cb=lambda user, made=zeros: user is not made)
        part.recompile()


def with_growing_offsets(gm: fx.GraphModule) -> None:
    """Let no bag of embeddings end before it begins: torch looks at the first offset and at the last alone. Offsets
    that grow stay as they are."""
    for part in (m for m in gm.modules() if isinstance(m, fx.GraphModule)):
        for node in list(part.graph.nodes):
            if isinstance(node.target, OpOverload) and node.target._opname in BAGS:
                offsets = node.args[2]
                with part.graph.inserting_before(node):
                    both = part.graph.call_function(torch.ops.aten.cummax.default, (offsets, 0))
                    largest = part.graph.call_function(operator.getitem, (both, 0))
                given = offsets.meta["val"]
                both.meta["val"] = given, torch.empty_like(given, dtype=torch.int64)
                largest.meta["val"] = given
                node.update_arg(2, largest)
        part.recompile()


def _targets(gm: fx.GraphModule) -> Iterator[object]:
    """What the nodes of a graph call, at any depth, and the ops that they hand to others."""
    for part in (m for m in gm.modules() if isinstance(m, fx.GraphModule)):
        for node in part.graph.nodes:
            if node.op == "call_function":
                yield node.target
                yield from (a for a in node.args if isinstance(a, OpOverload))
            elif node.op not in ("placeholder", "get_attr", "output"):
                yield f"{node.op} {node.target}"


def _relying(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """The nodes of a graph whose ops rely on operands that fit each other."""
    for part in (m for m in gm.modules() if isinstance(m, fx.GraphModule)):
        for node in part.graph.nodes:
            if isinstance(node.target, OpOverload) and node.target._opname in RELYING:
                yield node


def _fits(node: fx.Node) -> bool:
    """Whether what was traced of a node's operands shows that they fit."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))  # pyright: ignore
    return fits(node.target, args, kwargs)  # pyright: ignore


def _is_known(target: object) -> bool:
    if isinstance(target, HigherOrderOperator):
        return target.name() in _CONTROL
    if not isinstance(target, OpOverload):
        module, name = getattr(target, "__module__", None), getattr(target, "__name__", "")
        nests = module == "torch._functorch.predispatch"  # how deep transforms are nested
        return nests or target in _OF_NUMBERS or (module == "torch" and name.startswith("sym_"))
    if is_safe_op(target, apart=True):
        return True
    if target.namespace in _NAMESPACES:
        known = target._opname in _OF_FAKES | _OF_PROGRAMS | _MEMORY_AS_FOUND
        return known and not target._schema.is_mutable
    name = target._schema.name
    return target.namespace in _OF_PYTHON or name in OPDEFS or name in _OF_OTHERS


def _is_made_of_others(op: OpOverload) -> bool:
    """Whether an op writes what a known one gives, or is a composite of ops that are looked at one by one."""
    if op.namespace not in _NAMESPACES:
        return False
    known = _SAFE | _BY_PLACE | _OF_FAKES | _OF_PROGRAMS | _MEMORY_AS_FOUND
    return op._opname.removesuffix("_") in known or _dispatch_has_kernel_for_dispatch_key(
        op.name(), "CompositeImplicitAutograd"
    )
