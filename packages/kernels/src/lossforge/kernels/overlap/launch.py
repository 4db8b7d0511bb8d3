"""Host side of the overlap template: how images lie in memory, tile sizes, and the two launches."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lossforge.kernels.engine.launch import PLANS, PROGRAMS_A_GROUP, Layout, Plan, Slot, layout, slots, workspace
from lossforge.kernels.engine.layout import collapse, constants, per_row
from lossforge.kernels.engine.reduce import Scaling
from lossforge.kernels.overlap.backward import Coefficients, overlap_backward_kernel
from lossforge.kernels.overlap.kernel import Loss, Memory, overlap_kernel
from lossforge.kernels.overlap.planes import Config, Planes
from lossforge.kernels.tiles import OverlapTiles, overlap_tiles, tried


class OverlapSpec(NamedTuple):
    """A loss of regions, but for its logits: the formula and what every launch of it must know.

    target: (N, d…) integers, where `first` is channel 0's, or of the shape of x. activation: "softmax", "sigmoid" or None. skip: classes
    left out at the front. divisor: 0-d; each region's loss is multiplied by its class's weight and by scale / divisor. ce_scale: of a
    cross entropy, None without; ce_counted: over what is counted on the device.
    """

    formula: Callable[..., Any]
    target: Tensor
    weight: Tensor | None = None
    divisor: Tensor | None = None
    hyper: tuple[float, ...] = ()
    activation: str | None = "softmax"
    ignore_index: int = -100
    first: int = 0
    skip: int = 0
    squared: bool = False
    batch: bool = False
    present_only: bool = False
    scale: float = 1.0
    ce_scale: float | None = None
    ce_counted: bool = False
    empty_is_zero: bool = False


class Kind(NamedTuple):
    """What a Spec tells a plan beside the layouts of its tensors."""

    formula: Callable[..., Any]
    hyper: int  # how many
    activation: str | None
    ignore_index: int
    first: int
    skip: int
    squared: bool
    batch: bool
    present_only: bool
    ce: bool
    ce_counted: bool
    empty_is_zero: bool


def kind_of(s: OverlapSpec) -> Kind:
    flags = s.squared, s.batch, s.present_only, s.ce_scale is not None, s.ce_counted, s.empty_is_zero
    return Kind(s.formula, len(s.hyper), s.activation, s.ignore_index, s.first, s.skip, *flags)


class Geometry(NamedTuple):
    """Tensors as (images, classes, pixels): Planes without pointers, pixels in rows of `inner`, and the tiles."""

    images: int
    classes: int
    pixels: int
    inner: int
    planes: list[Planes]
    tiles: OverlapTiles
    softmax: bool

    @property
    def one_tile(self) -> bool:
        return not self.softmax or self.tiles.classes >= self.classes

    @property
    def blocks(self) -> int:
        """Of classes, each a program's own."""
        return 1 if self.softmax else triton.cdiv(self.classes, self.tiles.classes)

    @property
    def wide(self) -> bool:
        """Whether 32 bits do not hold the offsets from a tile's first pixel, or from the image's where pixels lie in rows."""
        classes = triton.cdiv(self.classes, self.tiles.classes) * self.tiles.classes
        pixels = self.tiles.pixels if self.inner == 0 else self.pixels + self.tiles.pixels
        reach = [classes * p.channel + (pixels * p.pixel if p.row is None else pixels // self.inner * p.row) for p in self.planes]
        return max(*reach, pixels) >= 2**31

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "ONE_TILE": self.one_tile,
            "ALL": self.classes % self.tiles.classes == 0,
            "WIDE": self.wide,
            "BC": self.tiles.classes,
            "BP": self.tiles.pixels,
            "BY_CLASS": self.tiles.own > 0,
        }


def geometry(layouts: Sequence[Layout], softmax: bool, ce: bool) -> Geometry | None:
    """layouts: of x (N, C, d…) and tensors of its shape, or of it without C. None where d… joins into more than two dimensions."""
    shape = layouts[0][0]
    strides = [one[1] if len(one[0]) == len(shape) else per_row(one[0], one[1], shape, 1) for one in layouts]
    sizes, steps = collapse(shape[2:], [s[2:] for s in strides])
    if len(sizes) > 2:
        return None
    planes = []
    for whole, step in zip(strides, steps, strict=True):
        row, pixel = (step[0] if len(sizes) == 2 else None), (step[-1] if sizes else 0)
        planes.append(Planes(None, whole[0], whole[1], pixel, row))
    inner = sizes[1] if len(sizes) == 2 else 0
    tiles = overlap_tiles(shape[1], softmax, planes[0].pixel == 1, ce)
    return Geometry(shape[0], shape[1], math.prod(shape[2:]), inner, planes, tiles, softmax)


class Sums(NamedTuple):
    """What the first launch reads and writes: a layout or a Slot each, None where absent."""

    x: Any
    target: Any
    weight: Any
    divisor: Any
    parts: Any = None
    ticket: Any = None
    out: Any = None
    total: Any = None
    coefficients: Any = None


class SumsPlan(NamedTuple):
    plan: Plan
    parts: int  # floats of scratch memory
    regions: int
    classes: int
    images: int


PROGRAMS = 2**21  # elements that all programs together hold in their tiles: twice what a large GPU keeps in registers at a time
WARPS = 1024  # that hold all classes of their pixels: the quickest of 1024 to 2640 on an H200
SCRATCH = 2**22  # floats of parts, where so many classes are added up in memory


def _known(kind: Kind, target: Layout) -> dict[str, bool]:
    return {
        "INDEX": not target[2].is_floating_point,
        "SOFTMAX": kind.activation == "softmax",
        "SIGMOID": kind.activation == "sigmoid",
        "SQUARED": kind.squared,
        "BATCH": kind.batch,
        "CE": kind.ce,
    }


@functools.lru_cache(maxsize=PLANS)
def _sums_plan(kind: Kind, layouts: tuple[Layout | None, ...], each: bool, tried: object) -> SumsPlan | None:
    """layouts: of Sums but what it writes."""
    given = Sums(*layouts)
    g = geometry((given.x, given.target), kind.activation == "softmax", kind.ce)
    if g is None:
        return None
    present = [*(one is not None for one in layouts), True, True, each, True, True]
    t = slots(Sums, present)
    floats = sum(present)
    sums = 3 + kind.ce + (count := kind.ce_counted and kind.activation == "sigmoid")
    tiles = triton.cdiv(g.pixels, g.tiles.pixels)
    limit = WARPS // g.tiles.warps // g.images if g.tiles.own else PROGRAMS // (g.tiles.classes * g.tiles.pixels) // (g.images * g.blocks)
    if not g.one_tile:
        limit = min(limit, SCRATCH // (g.images * sums * g.classes))
    programs = triton.cdiv(tiles, triton.cdiv(tiles, max(limit, 1)))  # so that none has a tile more than most
    x, target = (p._replace(ptr=slot) for p, slot in zip(g.planes, (t.x, t.target), strict=True))
    finish = min(triton.next_power_of_2(g.classes), 128)
    adjacent = g.planes[0].pixel == 1
    config = Config(
        **_known(kind, given.target),
        **g.constants,
        PRESENT=kind.present_only,
        COUNT=count,
        COUNTED=kind.ce_counted,
        V=g.tiles.own or (16 // given.x[2].itemsize if adjacent else 4),
        ADJACENT=adjacent,
        BF=finish,
        BK=2048 // finish,
    )
    plan = Plan(
        overlap_kernel,
        (g.images * programs, g.blocks),
        given.x[3],
        (
            x,
            target,
            Memory(t.parts, t.ticket, t.out, t.total, t.coefficients),
            constants(
                Loss(
                    formula=kind.formula,
                    hyper=tuple(Slot(floats + 2 + i) for i in range(kind.hyper)),
                    weight_ptr=t.weight,
                    ce_scale=Slot(floats + 1),
                    scaling=constants(Scaling(Slot(floats), t.divisor, None, kind.empty_is_zero)),
                )
            ),
            g.classes,
            constants(config),
            g.images,
            g.pixels,
            g.inner,
            kind.first,
            kind.skip,
            kind.ignore_index,
        ),
        num_warps=g.tiles.warps,
    )
    regions = 1 if kind.batch else g.images
    rows = g.images * (programs + kind.batch)
    return SumsPlan(plan, rows * sums * g.classes + 3 * g.images, regions, g.classes, g.images)


def _launch_sums(p: SumsPlan, spec: OverlapSpec, x: Tensor, each: bool) -> tuple[Tensor, Tensor]:
    """(the total, or each region's loss; the coefficients)."""
    device = x.device
    kept = p.images * PROGRAMS_A_GROUP <= 2**14
    ticket = workspace(p.images * PROGRAMS_A_GROUP, device).ticket if kept else torch.zeros(1 + p.images, dtype=torch.int32, device=device)
    ce = spec.ce_scale is not None
    parts, coefficients, total = (
        torch.empty(n, dtype=torch.float32, device=device) for n in (p.parts, (2 * p.regions + ce) * p.classes, ())
    )
    out = torch.empty(p.regions, p.classes - spec.skip, dtype=torch.float32, device=device) if each else None
    p.plan.launch(
        (x, spec.target, spec.weight, spec.divisor, parts, ticket, out, total, coefficients),
        (spec.scale, spec.ce_scale or 0.0, *spec.hyper),
    )
    return total if out is None else out, coefficients


def overlap(spec: OverlapSpec, x: Tensor, *, each: bool = False) -> tuple[Tensor, Tensor]:
    """The loss of logits x (N, C, d…) as a total, or of each region and class, (regions, classes); and what the gradient follows from."""
    plan = _sums_plan(kind_of(spec), tuple([layout(t) for t in (x, spec.target, spec.weight, spec.divisor)]), each, tried())
    if plan is None:
        return overlap(spec._replace(target=spec.target.contiguous()), x.contiguous(), each=each)
    return _launch_sums(plan, spec, x, each)


class Slopes(NamedTuple):
    """What the second launch reads and writes: a layout or a Slot each, None where absent."""

    x: Any
    target: Any
    gradient: Any
    coefficients: Any
    upstream: Any


@functools.lru_cache(maxsize=PLANS)
def _gradient_plan(kind: Kind, layouts: tuple[Layout | None, ...], tried: object) -> Plan | None:
    """layouts: of Slopes."""
    given = Slopes(*layouts)
    g = geometry((given.x, given.target, given.gradient), kind.activation == "softmax", kind.ce)
    if g is None:
        return None
    t = slots(Slopes, [one is not None for one in layouts])
    planes = (p._replace(ptr=slot) for p, slot in zip(g.planes, t[:3], strict=True))
    each = given.upstream is not None and len(given.upstream[0]) > 0
    return Plan(
        overlap_backward_kernel,
        (g.images * triton.cdiv(g.pixels, g.tiles.pixels), g.blocks),
        given.x[3],
        (
            *planes,
            Coefficients(t.coefficients, t.upstream),
            g.classes,
            constants(Config(**_known(kind, given.target), **g.constants, EACH=each)),
            g.images,
            g.pixels,
            g.inner,
            kind.first,
            kind.skip,
            kind.ignore_index,
        ),
        num_warps=g.tiles.warps,
    )


def overlap_gradient(spec: OverlapSpec, x: Tensor, coefficients: Tensor, upstream: Tensor | None, gradient: Tensor) -> None:
    """Write the gradient, from the coefficients that `overlap` gave. upstream: 0-d, of each region and class, or None for 1."""
    tensors = (x, spec.target, gradient, coefficients, None if upstream is None else upstream.contiguous())
    plan = _gradient_plan(kind_of(spec), tuple([layout(t) for t in tensors]), tried())
    if plan is not None:
        plan.launch(tensors)
        return
    fresh = torch.empty(x.shape, dtype=gradient.dtype, device=x.device)
    overlap_gradient(spec._replace(target=spec.target.contiguous()), x.contiguous(), coefficients, upstream, fresh)
    gradient.copy_(fresh)


def planned_overlap(spec: OverlapSpec, x: Tensor, gradient: Tensor | None) -> Callable[..., Tensor] | None:
    """Total and, where asked for, gradient: ((x, target, weight, …), divisor, gradient) → total.

    For tensors of these layouts and a Spec otherwise the same. None where copies would be needed.
    """
    kind = kind_of(spec)
    sums = _sums_plan(kind, tuple([layout(t) for t in (x, spec.target, spec.weight, spec.divisor)]), False, tried())
    if sums is None:
        return None
    coefficients_layout: Layout = ((0,), (1,), torch.float32, x.get_device(), True)
    slopes = None
    if gradient is not None:
        slopes = _gradient_plan(kind, (layout(x), layout(spec.target), layout(gradient), coefficients_layout, None), tried())
        if slopes is None:
            return None

    def total(tensors: Sequence[Tensor | None], divisor: Tensor | None, gradient: Tensor | None) -> Tensor:
        x, target, weight, *_ = tensors
        assert x is not None
        assert target is not None
        value, coefficients = _launch_sums(sums, spec._replace(target=target, weight=weight, divisor=divisor), x, False)
        if slopes is not None:
            slopes.launch((x, target, gradient, coefficients))
        return value

    return total
