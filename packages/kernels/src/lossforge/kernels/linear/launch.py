"""Host side of losses inside the matrix product: which calls it takes, tiles, and the launches.

The engine of fused losses (lossforge.losses.engine.linear) calls `forward` or `exponentials_of` on some of the rows. In backward it calls
`shares_of` once, and `slopes_of` on some of the classes.
"""

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lossforge.kernels.call import FLOAT, FROM_WEIGHT, NEVER_ROUNDED, Formulas
from lossforge.kernels.classes.calls import RowwiseCall
from lossforge.kernels.classes.rowwise import sweep
from lossforge.kernels.classes.rowwise.kernel import Kept
from lossforge.kernels.classes.rowwise.launch import flags_of, gradients_of, labels_of, logits_of, outputs_of, results_of, row_loss, sums_of
from lossforge.kernels.classes.rowwise.rows import Target
from lossforge.kernels.engine.launch import Launch, aligned, chip, new_like, sum_slots
from lossforge.kernels.engine.layout import Results, Strided, Tensors
from lossforge.kernels.linear.exponentials import (
    SAMPLE,
    exponentials,
    linear_finish_kernel,
    linear_offsets_kernel,
    linear_raise_kernel,
    linear_scale_kernel,
)
from lossforge.kernels.linear.kernel import (
    Config,
    Given,
    linear_join_kernel,
    linear_product_kernel,
    linear_shares_kernel,
    slopes,
    statistics,
)
from lossforge.kernels.linear.sharded_rows import linear_sharded_rows_kernel
from lossforge.kernels.plans import computed, in_order, narrowed
from lossforge.kernels.product import add_product
from lossforge.kernels.tiles import ProductTiles, product_tiles
from lossforge.kernels.torch_internals import constant_in_graphs

HALF = (torch.float16, torch.bfloat16)
UNIT = 8
"""Elements of half precision in 16 bytes: descriptors take multiples of it."""
JOIN = 32
"""Rows that a program joins."""
PARTS = 48 * 2**20
"""Bytes of the statistics of tiles, which decide how many rows a launch takes."""
SHARED = 200 * 1024
"""Bytes of shared memory that the tiles need."""
WORK = 2**35
"""The least rows × features × classes for which a scalar loss goes by exponentials: of less, their launches take longer than a pass over
logits of float32."""
EXPONENTIALS = 3072
"""The most features for it where logits may be rounded. With more, a pass over rounded logits takes no longer than cuBLAS saves."""


def tiles_of(weight: Tensor) -> ProductTiles:
    """Return the tiles of a GPU. The interpreter takes those of sm_90."""
    device = weight.get_device()
    return product_tiles(device >= 0 and torch.cuda.get_device_capability(device) >= (10, 0))


@constant_in_graphs
@functools.cache
def programs(device: int) -> int:
    """Return the multiprocessors of a GPU that the product was made for, from sm_90 on with large shared memory; 0 for any other."""
    found = chip(device)
    if found is None or found[1] < SHARED or torch.cuda.get_device_capability(device) < (9, 0):
        return 0
    return found[0]


def computes(call: RowwiseCall[Any]) -> bool:
    """Return whether the product computes a call: one class index a row, half precision, and a weight that descriptors can address."""
    x, weight = call.x, call.x.weight
    if weight.dtype not in HALF or not programs(weight.get_device()):
        return False
    if not (x.input.numel() and weight.shape[1] % UNIT == 0 and weight.is_contiguous()):
        return False
    if not (torch.compiler.is_compiling() or aligned(weight)):  # a graph's operator copies one that is not
        return False
    one_class = not call.target.is_floating_point() and call.target_b is None
    weighted_smoothing = call.weight is not None and call.label_smoothing
    return one_class and call.row_scale is None and not (weighted_smoothing or call.spread or call.power or call.moves_target())


def exponentiates(call: RowwiseCall[Any], classes: int | None = None, same_bits: bool = False) -> bool:
    """Return whether `exponentials_of` computes a call whose gradient is wanted in forward, in less time than chunks of logits take.

    classes: in place of the layer's own number, one that several processes have in common.
    same_bits: whether its bits are wanted, however little work there is.
    """
    layer = call.x
    classes, features = layer.weight.shape[0] if classes is None else classes, layer.weight.shape[1]
    log_p2 = call.outputs[5]  # whose squares may be out of float32's range
    if layer.weight.dtype != torch.bfloat16 or call.label_smoothing or log_p2:
        return False
    most = {FROM_WEIGHT: EXPONENTIALS, NEVER_ROUNDED: features}.get(layer.logits, 0)
    enough = same_bits or len(layer.input) * features * classes >= WORK
    return features <= most and enough and computes(call)


def rows_a_launch(call: RowwiseCall[Any]) -> int:
    """Return how many rows a forward launch takes, such that the statistics of its tiles fit in PARTS: whole groups of tiles."""
    tiles = tiles_of(call.x.weight)
    planes, _ = _planes(call)
    a_row = 4 * planes * 2 * triton.cdiv(call.x.weight.shape[0], tiles.columns)
    group = tiles.rows * tiles.group
    return max(PARTS // a_row // group, 1) * group


def _planes(call: RowwiseCall[Any], same_bits: bool = False) -> tuple[int, dict[str, int]]:
    """Return the number of planes of statistics, and which holds what. same_bits: of exponentials_of, with no further results of rows."""
    _, _, entropy, correct, argmax, log_p2, mean_logit = call.outputs
    wanted = {"ENTROPY": entropy, "SUM": mean_logit or call.label_smoothing, "SQUARES": log_p2, "ARGMAX": correct or argmax}
    names = [name for name, want in wanted.items() if want] or ["MAXIMA"] * same_bits
    return 2 + len(names), {name: i for i, name in enumerate(names, 2)}


def _config(weight: Tensor, **others: Any) -> Config:
    tiles = tiles_of(weight)
    return Config(tiles.rows, tiles.columns, tiles.depth, tiles.group, programs(weight.get_device()), **others)


def _ordered(t: Tensor) -> Tensor:
    """Return a tensor in contiguous memory that begins at an aligned address."""
    if t.is_contiguous() and aligned(t):
        return t
    return computed(functools.partial(torch.clone, memory_format=torch.contiguous_format), t)


def _descriptor(t: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return the descriptor of a matrix. One row may have any stride, where a descriptor takes multiples of 16 bytes alone."""
    step = t.stride(0) if len(t) > 1 else -(-t.shape[1] // UNIT) * UNIT
    return TensorDescriptor(t, [*t.shape], [step, 1], [rows, columns])


def _target(call: RowwiseCall[Any]) -> Target:
    weight = Strided() if call.lam is None else Strided(call.lam, 0, call.lam.stride(0))
    return Target(Strided(_ordered(call.target), 0, 1), Strided(), weight, Strided(), labels_of(call))


def _product(
    call: RowwiseCall[Any], out: Tensor | None, arguments: tuple[Any, ...], columns: tuple[int, int], epilogue: Any, config: Config
) -> Launch:
    """columns: the first class and how many."""
    layer, (first, count) = call.x, columns
    rows, depth = layer.input.shape
    tiles = tiles_of(layer.weight)
    number = triton.cdiv(rows, tiles.rows) * triton.cdiv(count, tiles.columns)
    if out is None:
        to: Any = None
    else:
        to = Strided(out, out.stride(0), 1) if config.AGAIN else _descriptor(out, tiles.rows, tiles.columns // 2)
    given = (
        _descriptor(_ordered(layer.input), tiles.rows, tiles.depth),
        _descriptor(layer.weight, tiles.columns, tiles.depth),
        to,
        *arguments,
        rows,
        count,
        depth,
        first,
    )
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return Launch(linear_product_kernel, (min(number, config.PROGRAMS),), given, config=config, EPILOGUE=epilogue, **options)


def forward(call: RowwiseCall[Any], formulas: Formulas, keep: bool) -> Results:
    """Return results and what is kept for backward, as the row-wise template's forward on logits, for a call whose divisor is known."""
    layer, (rows, classes) = call.x, call.x.shape
    across = 2 * triton.cdiv(classes, tiles_of(layer.weight).columns)  # halves of tiles
    count, planes = _planes(call)
    config = _config(layer.weight, **planes)
    parts, own = new_like(layer.input, ((count, across, rows), FLOAT)), new_like(layer.input, ((rows,), FLOAT))
    target, given = _target(call), Given(in_order(layer.bias), parts, own)
    _product(call, None, (logits_of(call, Strided(), classes), target, given), (0, classes), statistics, config).start()
    out, sums = outputs_of(call, layer.input, keep), sums_of(call)
    of_rows = sweep.Config(JOIN, 1, EMPTY_IS_ZERO=call.empty_is_zero, EVEN=bool(call.label_smoothing), **flags_of(out))
    loss = row_loss(call, formulas, call.normalizer)
    arguments = (logits_of(call, Strided(own, 0, 1, 0), classes), target, parts, out, sums, loss, rows, across, config, of_rows)
    join = Launch(linear_join_kernel, (triton.cdiv(rows, JOIN),), arguments, sum(s is not None for s in sums), num_warps=4)
    return results_of(out, join.start(), None)


def _sampled(step: int, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the logits of every step-th class in float32, at most SAMPLE of them."""
    some = weight[::step][: SAMPLE.value]
    found = torch.empty((len(x), len(some)), dtype=torch.float32, device=x.device)
    add_product(found, x, some.t(), True)
    return found if bias is None else found.add_(bias[::step][: SAMPLE.value])


def ordered(call: RowwiseCall[Any]) -> RowwiseCall[Any]:
    """Return the call with an input that descriptors can address, a copy where its own cannot be."""
    return call._replace(x=call.x.with_input(_ordered(call.x.input)))


def exponentials_of(call: RowwiseCall[Any], formulas: Formulas, keep: bool, to: Tensor, same_bits: bool) -> Results:
    """Return what `forward` does, and then the rows' factors v: the gradient of the logits is v times what `to` holds then.

    same_bits: whether results of rows have the bits of `forward`, which takes one more exponential an element.
    """
    call = ordered(call)
    layer, (rows, classes) = call.x, call.x.shape
    across = 2 * triton.cdiv(classes, tiles_of(layer.weight).columns)
    count, planes = _planes(call, same_bits)
    parts, offsets, own, factors = (new_like(layer.input, (shape, FLOAT)) for shape in ((count, across, rows), *[(rows,)] * 3))
    again, listed = new_like(layer.input, ((1 + rows,), torch.int32)), new_like(layer.input, layer.input)
    step = max(classes // SAMPLE.value, 1)
    sample = computed(functools.partial(_sampled, step), *layer.tensors)
    logits, target, given = logits_of(call, Strided(), classes), _target(call), Given(in_order(layer.bias), parts, own, offsets, again)
    out, sums = outputs_of(call, layer.input, keep), sums_of(call)
    of_rows, grid = sweep.Config(JOIN, 1, EMPTY_IS_ZERO=call.empty_is_zero, **flags_of(out)), (triton.cdiv(rows, JOIN),)
    arguments: tuple[Any, ...] = (logits, target, sample, offsets, again, rows, sample.shape[1], step, of_rows)
    Launch(linear_offsets_kernel, grid, arguments, num_warps=4).start()
    config = _config(layer.weight, **planes)
    _product(call, to, (logits, target, given), (0, classes), exponentials, config).start()
    arguments = (given, layer.input, listed, layer.input.shape[1], rows, across, classes, of_rows)
    Launch(linear_raise_kernel, grid, arguments, num_warps=4).start()
    of_listed, again_config = call._replace(x=layer.with_input(listed)), config._replace(AGAIN=True)
    _product(of_listed, to, (logits, target, given), (0, classes), exponentials, again_config).start()
    of_own, loss = logits_of(call, Strided(own, 0, 1, 0), classes), row_loss(call, formulas, call.normalizer)
    arguments = (of_own, target, given, to, to.stride(0), factors, out, sums, loss, rows, across, config, of_rows)
    totals = Launch(linear_finish_kernel, grid, arguments, sum(s is not None for s in sums), num_warps=4).start()
    return *results_of(out, totals, None), factors


def scale_rows(to: Tensor, x: Tensor, factors: Tensor, finite: bool = False) -> None:
    """Write a matrix times a float32 factor a row, perhaps in its own place. finite: with 0 in place of what is not finite."""
    (rows, columns), strided = x.shape, (Strided(t, *t.stride()) for t in (to, x))
    grid = triton.cdiv(rows, 8), triton.cdiv(columns, 512)
    Launch(linear_scale_kernel, grid, (*strided, factors, rows, columns), FINITE=finite, BR=8, BC=512, num_warps=4).start()


def sharded_rows_of(call: RowwiseCall[Any], formulas: Formulas, gathered: Tensor, to: Tensor, rank: int, held: bool) -> Results:
    """Return the total loss and the rows' factors of a call whose classes are spread over processes.

    Args:
        call: of some rows and this process's classes, with the scale and divisor of the whole loss. lam: the rows' weights.
        gathered: of each process, what `exponentials_of` kept: offsets, log-sums, and losses, (processes, 3, rows).
        to: the exponentials, in which this writes those of the targets.
        rank: this process.
        held: whether a row's weight is its probability.
    """
    rows, classes = call.x.shape
    factors = new_like(call.x.input, ((rows,), FLOAT))
    of_rows, logits = sweep.Config(JOIN, 1, EMPTY_IS_ZERO=call.empty_is_zero), logits_of(call, Strided(), classes)
    numbers, loss = Strided(gathered, gathered.stride(0), gathered.stride(1)), row_loss(call, formulas, call.normalizer)
    arguments = (logits, _target(call), numbers, to, to.stride(0), factors, sum_slots(), loss, rows, rank, len(gathered), held, of_rows)
    (total,) = Launch(linear_sharded_rows_kernel, (triton.cdiv(rows, JOIN),), arguments, 1, num_warps=4).start()
    return total, factors


def _backward_config(call: RowwiseCall[Any], of_entropy: bool) -> Config:
    even = (5 if of_entropy else 3) if call.label_smoothing else 0
    return _config(call.x.weight, ENTROPY=3 if of_entropy else 0, EVEN=even, BACKWARD=True)


def shares_of(
    call: RowwiseCall[Any], formulas: Formulas, stats: Tensor, entropy: Tensor | None, grad_outputs: Tensors
) -> tuple[Tensor, ...]:
    """Return the factors of the rows' gradients, for those of the results."""
    rows, classes = call.x.shape
    shares = new_like(call.x.input, ((6, rows), FLOAT))
    given = gradients_of(grad_outputs)
    has_entropy, smoothed = given.entropy is not None, bool(call.label_smoothing)
    of_rows = sweep.Config(128, 1, EMPTY_IS_ZERO=call.empty_is_zero, EVEN=smoothed, ENTROPY=has_entropy, BACKWARD=True)
    arguments = (
        _target(call),
        Kept(stats, entropy if has_entropy else None),
        given,
        row_loss(call, formulas, call.normalizer),
        shares,
        classes,
        rows,
        _backward_config(call, has_entropy),
        of_rows,
    )
    Launch(linear_shares_kernel, (triton.cdiv(rows, 128),), arguments, num_warps=4).start()
    return (shares,)


def new_slopes(call: RowwiseCall[Any], classes: int) -> Tensor:
    """Return memory for the gradient of so many classes, whose rows begin at multiples of 16 bytes."""
    rows, x = call.x.shape[0], call.x.input
    return narrowed(new_like(x, ((rows, -(-classes // UNIT) * UNIT), x.dtype)), 1, 0, classes)


def slopes_of(call: RowwiseCall[Any], of_entropy: bool, start: int, shares: Tensor, to: Tensor) -> None:
    """Store the gradient of the classes from `start` on, as many as `to` has."""
    given = logits_of(call, Strided(), call.x.shape[1]), _target(call), Given(in_order(call.x.bias), shares_ptr=shares)
    _product(call, to, given, (start, to.shape[1]), slopes, _backward_config(call, of_entropy)).start()
