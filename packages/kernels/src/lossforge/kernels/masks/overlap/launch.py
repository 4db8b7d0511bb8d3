"""Host side of the overlap template: how images lie in memory, tile sizes, and the two launches."""

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lossforge.kernels.call import FLOAT, Formulas
from lossforge.kernels.engine.launch import PROGRAMS_A_GROUP, Launch, addressed, new_like, workspace
from lossforge.kernels.engine.layout import Results, Tensors, collapse, constants, per_row
from lossforge.kernels.engine.reduce import Scaling
from lossforge.kernels.engine.template import Launches, TwoLaunches
from lossforge.kernels.masks.calls import OverlapCall
from lossforge.kernels.masks.overlap.backward import overlap_backward_kernel
from lossforge.kernels.masks.overlap.kernel import Loss, Memory, overlap_kernel
from lossforge.kernels.masks.overlap.planes import Config, Planes
from lossforge.kernels.plans import computed, in_order
from lossforge.kernels.tiles import OverlapTiles, overlap_tiles

PROGRAMS = 2**21  # elements that all programs together hold in their tiles: twice what a large GPU keeps in registers at a time
WARPS = 1024  # that hold all classes of their pixels: the quickest of 1024 to 2640 on an H200
SCRATCH = 2**22  # floats of parts, where so many classes are added up in memory


class Geometry(NamedTuple):
    """Tensors as (images, classes, pixels): Planes of x, target and others, and of the mask, pixels in rows of `inner`, and the tiles."""

    images: int
    classes: int
    pixels: int
    inner: int
    planes: list[Planes]
    mask: Planes | None
    tiles: OverlapTiles
    softmax: bool

    @property
    def blocks(self) -> int:
        """Of classes, each a program's own."""
        return 1 if self.softmax else triton.cdiv(self.classes, self.tiles.classes)

    @property
    def wide(self) -> bool:
        """Whether 32 bits do not hold the offsets from a tile's first pixel, or from the image's where pixels lie in rows."""
        classes = triton.cdiv(self.classes, self.tiles.classes) * self.tiles.classes
        pixels = self.tiles.pixels if self.inner == 0 else self.pixels + self.tiles.pixels
        reach = [
            classes * p.channel + (pixels * p.pixel if p.row is None else pixels // self.inner * p.row)
            for p in (*self.planes, self.mask)
            if p is not None
        ]
        return max(*reach, pixels) >= 2**31

    @property
    def held(self) -> tuple[int, ...]:
        """The classes of tiles that hold all classes of their pixels together; empty: a sweep takes them."""
        if not self.tiles.own:
            return () if self.softmax and self.tiles.classes < self.classes else (self.tiles.classes,)
        if self.classes <= 8:  # fewer registers: 168 for 8 classes, where larger tiles take 226
            return (1,) * self.classes
        # the last tile has one class and so the shape of the labels': then the same lanes read both
        return (*(2**i for i in reversed(range(self.classes.bit_length())) if (self.classes - 1) >> i & 1), 1)

    def config(self, call: OverlapCall, **others: Any) -> Config:
        """Return what both launches know, and `others` of one of them."""
        own = self.tiles.own > 0
        config = Config(
            INDEX=not call.target.is_floating_point(),
            MASK=call.mask is not None,
            SOFTMAX=self.softmax,
            SIGMOID=call.activation == "sigmoid",
            SQUARED=call.squared_pred,
            BATCH=call.batch,
            CE=call.lambda_ce is not None,
            CONFUSION=call.confusion,
            HELD=self.held,
            OWN=self.tiles.own,
            ALL=own or self.classes % self.tiles.classes == 0,
            WIDE=self.wide,
            BC=self.tiles.classes,
            BP=self.tiles.pixels,
            **others,
        )
        return constants(config)

    def numbers(self, call: OverlapCall) -> tuple[int, ...]:
        """Return the kernels' last parameters. In another order ptxas took 185 registers for the gradient of 21 classes in bfloat16, not
        167."""
        return self.images, self.pixels, self.inner, self.classes, call.first(), call.skip(), call.ignore_index


def geometry(call: OverlapCall, *others: Any) -> Geometry | None:
    """Lay out x (N, C, d…), the target, the mask and others of these shapes. None where d… joins into more than two dimensions."""
    shape, softmax = call.x.shape, call.activation == "softmax"
    tensors = (call.x, call.target, *others, *([] if call.mask is None else [call.mask]))
    strides = [t.stride() if t.ndim == len(shape) else per_row(t.shape, t.stride(), shape, 1) for t in tensors]
    sizes, steps = collapse(shape[2:], [s[2:] for s in strides])
    if len(sizes) > 2:
        return None
    inner = sizes[1] if len(sizes) == 2 else 0
    planes = [
        Planes(t, whole[0], whole[1], pixel=step[-1] if sizes else 0, row=step[0] if inner else None)
        for t, whole, step in zip(tensors, strides, steps, strict=True)
    ]
    mask = None if call.mask is None else planes.pop()
    more = call.lambda_ce is not None or call.confusion
    tiles = overlap_tiles(shape[1], softmax, planes[0].pixel == 1, more, mask is not None)
    return Geometry(shape[0], shape[1], math.prod(shape[2:]), inner, planes, mask, tiles, softmax)


def _sums(call: OverlapCall) -> int:
    """Return the number of sums of a region: I, P, Y, perhaps the cross entropy, and what it counts; or the four of a confusion matrix."""
    return 3 + call.confusion + (call.lambda_ce is not None) + call.by_elements


def _programs(call: OverlapCall, g: Geometry) -> int:
    """Programs an image and block of classes, so many that none has a tile more than most."""
    tiles = triton.cdiv(g.pixels, g.tiles.pixels)
    limit = WARPS // g.tiles.warps // g.images if g.tiles.own else PROGRAMS // (g.tiles.classes * g.tiles.pixels) // (g.images * g.blocks)
    if not g.held:
        limit = min(limit, SCRATCH // (g.images * _sums(call) * g.classes))
    return triton.cdiv(tiles, triton.cdiv(tiles, max(limit, 1)))


class Given(NamedTuple):
    """What the second launch takes beside the call. grad_output: 0-d, of each region and class, or None for 1."""

    coefficients: Tensor | None
    grad_output: Tensor | None
    gradient: Tensor


def _make_gradient(call: OverlapCall, a: Given) -> Launch | None:
    g = geometry(call, a.gradient)
    if g is None:
        return None
    grid = (g.images * triton.cdiv(g.pixels, g.tiles.pixels), g.blocks)
    config = g.config(call, EACH=a.grad_output is not None and a.grad_output.ndim > 0)
    x, target, gradient = g.planes
    arguments = (x, target, g.mask, gradient, a.coefficients, a.grad_output, config, *g.numbers(call))
    return Launch(overlap_backward_kernel, grid, arguments, num_warps=g.tiles.warps)


def _ticket(x: Tensor) -> Tensor:
    """Zeroed counts of the programs that finished: one an image, and one for all."""
    images = x.shape[0]
    if images * PROGRAMS_A_GROUP <= 2**14:
        return workspace(images * PROGRAMS_A_GROUP, x.device).ticket
    return torch.zeros(1 + images, dtype=torch.int32, device=x.device)


def _loss(call: OverlapCall, formulas: Formulas | None) -> Loss:
    (regions, classes), mean = call.regions, call.reduction == "mean"
    ce_scale = call.lambda_ce or 0.0
    if mean and not call.counted:
        ce_scale /= call.x.numel() // call.x.shape[1] if call.activation == "softmax" else call.x.numel()
    if call.by_elements and call.activation == "softmax":
        ce_scale *= call.x.shape[1]  # its mean is over pixels
    scale = float(call.loss_scale / (regions * classes) if mean else call.loss_scale)
    scaling = constants(Scaling(scale, call.normalizer, None, call.empty_is_zero))
    return Loss(None if formulas is None else formulas.formula, tuple(call.hyper), call.weight, float(ce_scale), scaling)


def _prepared(call: OverlapCall) -> OverlapCall:
    """Return the call with tensors that the kernels address."""
    if geometry(call) is not None:
        return call
    return call._replace(x=in_order(call.x), target=in_order(call.target), mask=in_order(call.mask))


def _compute(call: OverlapCall, formulas: Formulas | None, keep: bool) -> tuple[Tensors, Tensors]:
    g = geometry(call)
    assert g is not None
    x, images, programs = call.x, g.images, _programs(call, g)
    ticket = computed(_ticket, x)
    value, coefficients = call.shapes(keep)
    parts = new_like(x, ((images * (programs + call.batch) * _sums(call) * g.classes + 3 * images,), FLOAT))
    total, made = new_like(x, ((), FLOAT)), new_like(x, coefficients)
    out = new_like(x, value if call.reduction == "none" else None)
    block, adjacent = min(triton.next_power_of_2(g.classes), 128), g.planes[0].pixel == 1
    config = g.config(
        call,
        SUMS=_sums(call),
        PRESENT=call.present_only,
        COUNT=call.by_elements,
        COUNTED=call.counted,
        V=g.tiles.own or (16 // x.itemsize if adjacent else 4),
        ADJACENT=adjacent,
        BF=block,
        BK=2048 // block,
    )
    arguments = (*g.planes, g.mask, Memory(parts, ticket, out, total, made), _loss(call, formulas), config, *g.numbers(call))
    Launch(overlap_kernel, (images * programs, g.blocks), arguments, num_warps=g.tiles.warps).start()
    return (total if out is None else out,), (made,)


def _differentiate(call: OverlapCall, formulas: Formulas | None, kept: Tensors, grad_output: Tensor | None, gradients: Tensors) -> None:
    (coefficients,), (gradient,) = kept, gradients
    assert gradient is not None
    addressed(_make_gradient, call, Given(coefficients, in_order(grad_output), gradient)).start()


_LAUNCHES: Launches = TwoLaunches(_compute, _differentiate, _prepared)
forward, backward = _LAUNCHES.forward, _LAUNCHES.backward


def _sums_call(x: Tensor, target: Tensor, mask: Tensor | None, activation: str | None, ignore_index: int, batch: bool) -> OverlapCall:
    return OverlapCall("region_sums", x, target, mask=mask, activation=activation, ignore_index=ignore_index, batch=batch)


def sums(x: Tensor, target: Tensor, mask: Tensor | None, *options: Any) -> Results:
    """Return what is not used, and the four sums of a confusion matrix, of each region one after the other.

    options: activation, ignore_index, batch.
    """
    return forward(_sums_call(x, target, mask, *options), None, (None,), True)


def sums_backward(x: Tensor, target: Tensor, mask: Tensor | None, coefficients: Tensor, gradient: Tensor, *options: Any) -> None:
    """Write the logits' gradient. coefficients: a and b of each region, one after the other."""
    backward(_sums_call(x, target, mask, *options), None, (in_order(coefficients),), (None,), (gradient,))
