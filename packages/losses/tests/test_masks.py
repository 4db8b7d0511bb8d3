"""`mask`: a call with one equals the call on the chosen elements or pixels, and nothing that the others hold reaches value or gradient.

A mask of whole numbers stands for elements that are there as often.
"""

import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from loss_calls import gradient_of
from torch import Tensor

from lossforge import losses as L
from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import error, samples

NAN = float("nan")
DTYPES = pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-6), (torch.float64, 1e-12)])
masked = [loss for loss in LOSSES.values() if "mask" in inspect.signature(loss.function).parameters]
OF_ELEMENTS = [each for each in masked if each.template.name in ("elementwise", "pointwise")]
ELEMENTS = pytest.mark.parametrize("loss", OF_ELEMENTS, ids=lambda loss: loss.name)
REGIONS = pytest.mark.parametrize("loss", [each for each in masked if each.template.name == "overlap"], ids=lambda loss: loss.name)
LOVASZ = [each for each in masked if each.template.name == "lovasz"]
OVER_ROWS = ("quality_focal", "siglip", "multilabel_soft_margin")
"""Losses that do more over a row than to add up: their elements cannot be chosen one by one."""
OF_REGIONS = {
    "generalized_dice": (L.generalized_dice_loss, {}),
    "generalized_dice_simple": (L.generalized_dice_loss, {"weighting": "simple"}),
    "mcc": (L.mcc_loss, {}),
    "boundary": (L.boundary_loss, {}),
}


def test_which_losses_take_a_mask():
    """Every loss of elements or regions of the registry, and those of regions outside of it."""
    templates = {"elementwise", "pointwise", "overlap", "lovasz"}
    assert {each.template.name for each in masked} == templates
    assert len(masked) == len([each for each in LOSSES.values() if each.template.name in templates])
    assert {"bce", "focal", "quality_focal", "varifocal", "asymmetric", "dice_ce", "lovasz_hinge", "mse"} <= {each.name for each in masked}


def differentiated(function, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a function's values, and the gradient at x, whose entries differ."""
    x = x.detach().clone().requires_grad_()
    value = function(x)
    up = torch.linspace(-1, 2, value.numel(), dtype=value.dtype, device=value.device).view(value.shape)
    return value.detach(), torch.autograd.grad((value * up).sum(), x)[0]


def agree(ours, chosen, x: Tensor, nothing: Tensor, bound: float) -> None:
    """ours, chosen: functions of x, whose elements `nothing` hold nan for the first."""
    value, g = differentiated(ours, x.masked_fill(nothing, NAN))
    exact, g_exact = differentiated(chosen, x.double())
    assert value.shape == exact.shape
    assert error(value, exact) < bound
    assert error(g, g_exact) < bound
    assert not g[nothing.expand(g.shape)].any()


def counts_of(shape, device) -> Tensor:
    """How often each element is there, of which many are not."""
    return torch.randint(0, 4, shape, device=device) * torch.randint(0, 2, shape, device=device)


def dense_sample(loss, device, dtype):
    sample = next(s for s in samples(loss, device, dtype) if s.target is not None and s.target.shape == s.x.shape and s.x.ndim == 2)
    return sample.x.detach(), sample.target.detach(), {k: v for k, v in sample.kwargs.items() if k != "weight"}


@ELEMENTS
@DTYPES
def test_elements(loss, dtype, bound, device):
    x, y, options = dense_sample(loss, device, dtype)
    weighted = "weight" in inspect.signature(loss.function).parameters
    third = {k: v for k, v in options.items() if isinstance(v, Tensor) and v.shape == x.shape}
    options = {k: v for k, v in options.items() if k not in third}
    if loss.name in OVER_ROWS:
        counts = counts_of((len(x), 1), device)
        index = torch.arange(len(x), device=device).repeat_interleave(counts.flatten())
    else:
        counts = counts_of(x.shape, device)
        index = torch.arange(x.numel(), device=device).repeat_interleave(counts.flatten())
        x, y, third = x.flatten(), y.flatten(), {k: v.flatten() for k, v in third.items()}
        counts = counts.flatten()
    weight = torch.rand(x.shape, device=device, dtype=dtype)
    nothing = counts == 0
    for mask, taken in ((counts.to(dtype), index), (counts > 0, index.unique())):
        for reduction in ("mean", "sum"):
            given = {**options, "reduction": reduction}
            for own in (third, third | {"weight": weight}) if weighted else (third,):
                broken = {k: v.masked_fill(nothing, NAN) for k, v in own.items()}
                of_taken = {k: v[taken].double() for k, v in own.items()}
                agree(
                    lambda x, m=mask, b=broken, o=given: loss.function(x, y.masked_fill(nothing, NAN), **o, **b, mask=m),
                    lambda x, t=taken, w=of_taken, o=given: loss.function(x[t], y[t].double(), **o, **w),
                    x,
                    nothing,
                    bound,
                )
    if loss.name != "multilabel_soft_margin":
        agree(
            lambda x: loss.function(x, y.masked_fill(nothing, NAN), **third, **options, reduction="none", mask=counts.to(dtype)),
            lambda x: loss.function(x, y.double(), **{k: v.double() for k, v in third.items()}, **options, reduction="none") * counts,
            x,
            nothing,
            bound,
        )


@pytest.mark.parametrize(
    "function", [L.poly_binary_cross_entropy, L.asymmetric_loss_multi_label, L.total_variation], ids=lambda f: f.__name__
)
@DTYPES
def test_samples_that_count(function, dtype, bound, device):
    """A "batchmean" divides by the samples of which an element counts."""
    x, y = torch.rand(2, 8, 5, device=device, dtype=dtype)
    counts = torch.rand(8, 5, device=device) > 0.4
    counts[2:4] = False
    kept = torch.tensor([0, 1, 4, 5, 6, 7], device=device)
    agree(
        lambda x: function(x, y, reduction="batchmean", mask=counts),
        lambda x: (function(x[kept], y[kept].double(), reduction="none") * counts[kept]).sum() / 6,
        x,
        ~counts,
        bound,
    )


@DTYPES
def test_rows_that_count(dtype, bound, device):
    """Of a mean over rows each row with an element that counts is one; a mean over a row's classes is over those that count."""
    x, y = torch.rand(2, 8, 5, device=device, dtype=dtype)
    counts = torch.rand(8, 5, device=device) > 0.4
    counts[2:4], counts[0, 0] = False, True
    agree(
        lambda x: L.quality_focal_loss(x, y, mask=counts),
        lambda x: (L.quality_focal_loss(x, y.double(), reduction="none") * counts).sum() / counts.any(1).sum(),
        x,
        ~counts,
        bound,
    )
    for reduction in ("none", "sum"):
        agree(
            lambda x, r=reduction: L.multilabel_soft_margin_loss(x, y, reduction=r, mask=counts),
            lambda x, r=reduction: getattr(
                (L.binary_cross_entropy_with_logits(x, y.double(), reduction="none") * counts).sum(1) / counts.sum(1).clamp(min=1),
                "sum" if r == "sum" else "clone",
            )(),
            x,
            ~counts,
            bound,
        )


@DTYPES
def test_class_indices_of_elements(dtype, bound, device):
    """A mask beside class indices, of which those of rows without an element may be any, and beside ignored rows and mixup pairs."""
    x = torch.randn(9, 6, device=device, dtype=dtype)
    target, target_b = torch.randint(0, 6, (2, 9), device=device)
    counts = torch.rand(9, 6, device=device) > 0.4
    counts[3:5], counts[6] = False, True
    y, y_b = F.one_hot(target, 6).double(), F.one_hot(target_b, 6).double()
    target[3], target_b[4], target[6] = 1000, -7, -2
    kept = counts.clone()
    kept[6] = False
    for options in ({"weight": torch.rand(6, device=device, dtype=dtype)}, {"pos_weight": torch.rand(6, device=device, dtype=dtype)}):
        exact = {k: v.double().expand(9, 6)[kept] for k, v in options.items()}
        agree(
            lambda x, o=options: L.binary_cross_entropy_with_logits(x, target, mask=counts, **o),
            lambda x, e=exact: L.binary_cross_entropy_with_logits(x[kept], y[kept], **e),
            x,
            ~kept,
            bound,
        )
    target[6] = 0
    y[6] = F.one_hot(target[6], 6)
    agree(
        lambda x: L.sigmoid_focal_loss(x, target, reduction="mean", mask=counts, target_b=target_b, lam=0.3),
        lambda x: L.sigmoid_focal_loss(x[counts], (0.3 * y + 0.7 * y_b)[counts], reduction="mean"),
        x,
        ~counts,
        bound,
    )


@pytest.mark.parametrize("strided", [False, True])
def test_masks_that_broadcast(strided, device):
    """Bool and float masks that repeat along any dimensions, in any order of memory, beside dense targets and class indices."""
    x, y = torch.rand(2, 3, 4, 5, 6, device=device)
    target = torch.randint(-2, 4, (3, 5, 6), device=device)
    if strided:
        x = x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    of_classes = (target.unsqueeze(1) == torch.arange(4, device=device).view(1, 4, 1, 1)).double()
    known = (target != -2).unsqueeze(1)
    for shape in ((3, 1, 5, 6), (4, 1, 6), (3, 4, 1, 1), (1, 1, 5, 1), ()):
        often = counts_of(shape, device) if shape else torch.tensor(2, device=device)
        for mask in (often > 0, often.half(), often.float().mT.contiguous().mT if len(shape) > 1 else often.float()):
            counts = mask.double().expand(x.shape)
            agree(
                lambda x, m=mask: L.mse_loss(x, y, mask=m),
                lambda x, c=counts: ((x - y).square() * c).sum() / c.sum(),
                x,
                counts == 0,
                3e-6,
            )
            agree(
                lambda x, m=mask: L.sigmoid_focal_loss(x, target, reduction="mean", dim=1, mask=m),
                lambda x, c=counts * known: (L.sigmoid_focal_loss(x, of_classes) * c).sum() / c.sum(),
                x,
                counts * known == 0,
                3e-6,
            )


@pytest.mark.parametrize("loss", [L.binary_cross_entropy_with_logits, L.zlpr_loss], ids=lambda f: f.__name__)
def test_gradients_in_place(loss, device):
    """The memory of the logits gets the gradient of a masked call, too."""
    x, y, w = torch.rand(3, 9, 6, device=device)
    mask = w > 0.4
    value, g = gradient_of(loss, x, y, mask=mask)
    leaf = x.clone().requires_grad_()
    logits = 1.0 * leaf
    found = loss(logits, y, mask=mask, inplace=True)
    found.backward()
    assert torch.equal(found, value)
    assert torch.equal(leaf.grad, g)
    assert torch.equal(logits.detach(), g)


def test_groups_and_weights_that_are_learned(device):
    """A group of an element that does not count may be any; a weight with a gradient gets none there, also where the loss is nan."""
    x, y = torch.rand(2, 9, 6, device=device)
    counts = torch.rand(9, 6, device=device) > 0.4
    group, of_group = torch.randint(0, 3, (9, 6), device=device), torch.rand(3, device=device)
    agree(
        lambda x: L.preference_bce_with_logits(x, y, mask=counts, group=group.masked_fill(~counts, 77), group_weight=of_group),
        lambda x: L.preference_bce_with_logits(x[counts], y[counts].double(), group=group[counts], group_weight=of_group.double()),
        x,
        ~counts,
        3e-6,
    )
    weight = torch.rand(9, 6, device=device)
    broken = x.masked_fill(~counts, NAN)
    agree(
        lambda w: L.binary_cross_entropy_with_logits(broken, y.masked_fill(~counts, NAN), w, mask=counts),
        lambda w: L.binary_cross_entropy_with_logits(x[counts].double(), y[counts].double(), w[counts]),
        weight,
        ~counts,
        3e-6,
    )


def of_two_sets(x: Tensor, y: Tensor, often: Tensor, tp: float, tn: float, and_zero: bool) -> Tensor:
    """Return tn ln Σ exp(x / tn) over the negatives plus tp ln Σ exp(-x / tp) over the positives of each row that has a class for each."""
    found = []
    for row, true, each in zip(x, y > 0.5, often, strict=True):
        zero = row.new_zeros(int(and_zero))
        index = torch.arange(len(row), device=row.device).repeat_interleave(each)
        sides = [torch.cat([rate * row[index][kept] / t, zero]) for rate, t, kept in ((1, tn, ~true[index]), (-1, tp, true[index]))]
        found.append(tn * sides[0].logsumexp(0) + tp * sides[1].logsumexp(0) if all(map(len, sides)) else row.new_full((), -torch.inf))
    return torch.stack(found)


def zlpr(x: Tensor, y: Tensor, often: Tensor) -> Tensor:
    return of_two_sets(x, y, often, 1.0, 1.0, True).sum() / often.amax(1).sum()


def two_way(x: Tensor, y: Tensor, often: Tensor) -> Tensor:
    total = x.new_zeros(())
    for each, of, count in ((x, y, often), (x.T, y.T, often.T)):
        total = total + F.softplus(of_two_sets(each, of, count, 4.0, 2.0, False)).sum() / ((of > 0.5) & (count > 0)).any(1).sum()
    return total


@pytest.mark.parametrize("name", ["zlpr", "two_way"])
@DTYPES
def test_classes_of_samples(name, dtype, bound, device):
    """A row of which no class counts, one whose classes that count are all positive, and one without a positive."""
    x, y = torch.randn(9, 6, device=device, dtype=dtype), (torch.rand(9, 6, device=device) > 0.6).to(dtype)
    often = counts_of((9, 6), device)
    often[0], often[1], often[2] = 0, (y[1] > 0.5).long(), (y[2] < 0.5).long()
    ours, exact = (L.zlpr_loss, zlpr) if name == "zlpr" else (lambda x, y, **options: L.two_way_loss(x, y, 4.0, 2.0, **options), two_way)
    for mask, counts in ((often.to(dtype), often), (often > 0, (often > 0).long())):
        nothing = counts == 0
        agree(
            lambda x, m=mask, n=nothing: ours(x, y.masked_fill(n, NAN), mask=m),
            lambda x, c=counts: exact(x, y.double(), c),
            x,
            nothing,
            bound,
        )


def test_variances_that_do_not_count_may_be_negative(device):
    x, y, var = torch.rand(3, 2, 4, device=device)
    mask = torch.tensor([True, False, True, True], device=device)
    var[:, 1] = -1.0
    found = L.gaussian_nll_loss(x, y, var, mask=mask, validate=True)
    torch.testing.assert_close(found, L.gaussian_nll_loss(x[:, mask], y[:, mask], var[:, mask]))
    with pytest.raises(ValueError, match="var must be at least 0, got -1"):
        L.gaussian_nll_loss(x, y, var, mask=~mask, validate=True)


def problem(dtype, device):
    """Logits, class indices, dense targets and how often each pixel counts."""
    x = torch.randn(2, 4, 5, 7, device=device, dtype=dtype)
    target = torch.randint(0, 4, (2, 5, 7), device=device)
    return x, target, torch.rand(x.shape, device=device, dtype=dtype), counts_of((2, 5, 7), device)


def of_pixels(t: Tensor, image: int, often: Tensor) -> Tensor:
    """Return an image's pixels, each as often as it counts: (1, C, K), or (1, K) without classes."""
    t = t[image].flatten(-2)
    return t[..., torch.arange(t.shape[-1], device=t.device).repeat_interleave(often[image].flatten())].unsqueeze(0)


def of_batch(t: Tensor, often: Tensor) -> Tensor:
    """Return the pixels of all images as those of one."""
    return torch.cat([of_pixels(t, image, often) for image in range(len(t))], -1)


@REGIONS
@DTYPES
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("kind", ["index", "dense"])
def test_pixels_of_regions(loss, kind, activation, dtype, bound, device):
    x, target, y, often = problem(dtype, device)
    options = [{"weight": torch.rand(4, device=device, dtype=dtype)}, *loss.options[-1:]]
    for mask, counts in ((often.to(dtype), often), (often > 0, (often > 0).long())):
        of_bool = mask.dtype == torch.bool  # which becomes weights of 0 and 1: one call shows it
        nothing = counts == 0
        given = target.masked_fill(nothing, 99) if kind == "index" else y.masked_fill(nothing.unsqueeze(1), NAN)
        true = target if kind == "index" else y.double()
        for own in options[:1] if of_bool else options:
            exact = {k: v.double() if isinstance(v, Tensor) else v for k, v in own.items()}
            for reduction in loss.reductions[:1] if of_bool else loss.reductions:
                known = {"activation": activation, "reduction": reduction}
                agree(
                    lambda x, g=given, m=mask, o=own, k=known: loss.function(x, g, mask=m, batch=True, **o, **k),
                    lambda x, c=counts, t=true, e=exact, k=known: loss.function(of_batch(x, c), of_batch(t, c), batch=True, **e, **k),
                    x,
                    nothing.unsqueeze(1),
                    bound,
                )
            if "none" in loss.reductions and not of_bool:
                agree(
                    lambda x, g=given, m=mask, o=own: loss.function(
                        x, g, mask=m.unsqueeze(1), activation=activation, reduction="none", **o
                    ),
                    lambda x, c=counts, t=true, e=exact: torch.cat(
                        [
                            loss.function(of_pixels(x, i, c), of_pixels(t, i, c), activation=activation, reduction="none", **e)
                            for i in (0, 1)
                        ]
                    ),
                    x,
                    nothing.unsqueeze(1),
                    bound,
                )


def test_cross_entropy_beside_regions_is_a_mean_over_pixels(device):
    x, _, y, often = problem(torch.float32, device)
    chosen = often > 0
    found = gradient_of(L.dice_ce_loss, x, y, mask=chosen, lambda_dice=0.0)
    exact = gradient_of(lambda x: F.cross_entropy(x.movedim(1, 3)[chosen], y.movedim(1, 3)[chosen].double()), x.double())
    for got, right in zip(found, exact, strict=True):
        assert error(got, right) < 3e-6


@REGIONS
@DTYPES
def test_elements_of_regions(loss, dtype, bound, device):
    """Each class of a sigmoid may have its own pixels."""
    x, _, y, _ = problem(dtype, device)
    often = counts_of(x.shape, device)
    nothing = often == 0

    def chosen(x: Tensor) -> Tensor:
        """Return the sum of each class's loss as that of one mask."""
        each = [
            loss.function(of_batch(x[:, c], often[:, c]).unsqueeze(1), of_batch(y[:, c], often[:, c]).unsqueeze(1).double(), **options)
            for c in range(4)
        ]
        return torch.stack(each).sum()

    options = {"activation": "sigmoid", "batch": True, "reduction": "sum"}
    agree(lambda x: loss.function(x, y.masked_fill(nothing, NAN), mask=often.to(dtype), **options), chosen, x, nothing, bound)


@pytest.mark.parametrize("loss", LOVASZ, ids=lambda loss: loss.name)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@DTYPES
def test_pixels_of_sorted_errors(loss, reduction, dtype, bound, device):
    x, target, _, often = problem(dtype, device)
    counts = often > 0
    if loss.name == "lovasz_hinge":
        x, target = x[:, :1], target % 2
    broken = target.masked_fill(~counts, 99)
    broken[0, 0, 0], target[0, 0, 0], kept = 255, 255, counts.clone()
    kept[0, 0, 0] = False

    def of(image: int | None, x: Tensor) -> Tensor:
        taken = of_batch if image is None else lambda t, often: of_pixels(t, image, often)
        return loss.function(taken(x, kept.long()), taken(target, kept.long()), reduction=reduction)

    agree(
        lambda x: loss.function(x, broken, ignore_index=255, reduction=reduction, mask=counts),
        lambda x: of(None, x),
        x,
        ~kept.unsqueeze(1),
        bound,
    )
    if reduction == "none":
        agree(
            lambda x: loss.function(x, broken, per_image=True, ignore_index=255, reduction=reduction, mask=counts.unsqueeze(1)),
            lambda x: torch.stack([of(0, x), of(1, x)]),
            x,
            ~kept.unsqueeze(1),
            bound,
        )


@pytest.mark.parametrize("name", OF_REGIONS)
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@DTYPES
def test_pixels_of_other_regions(name, activation, dtype, bound, device):
    x, target, y, often = problem(dtype, device)
    function, own = OF_REGIONS[name]
    dense = y if name == "boundary" else F.one_hot(target, 4).movedim(-1, 1).to(dtype)
    for mask, counts in ((often.to(dtype), often), (often > 0, (often > 0).long())):
        nothing = counts == 0
        known = {**own, "activation": activation, "reduction": "none"}
        calls = [dense.masked_fill(nothing.unsqueeze(1), NAN), *([] if name == "boundary" else [target.masked_fill(nothing, 99)])]
        for given in calls:
            agree(
                lambda x, g=given, m=mask, k=known: function(x, g, mask=m, **k),
                lambda x, c=counts, k=known: torch.cat(
                    [function(of_pixels(x, i, c), of_pixels(dense.double(), i, c), **k) for i in (0, 1)]
                ),
                x,
                nothing.unsqueeze(1),
                2 * bound if dtype == torch.float32 else bound,
            )


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@DTYPES
def test_as_monai(activation, dtype, bound, device):
    """MaskedDiceLoss, which multiplies probabilities and targets by a mask of pixels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monai = pytest.importorskip("monai.losses")
    x, _, y, often = problem(dtype, device)
    counts = (often > 0).unsqueeze(1)
    for options in ({}, {"batch": True, "include_background": False}, {"squared_pred": True, "reduction": "none"}):
        exact = monai.MaskedDiceLoss(**{activation: True}, **options)
        agree(
            lambda x, o=options: L.dice_loss(x, y, activation=activation, mask=counts, **o),
            lambda x, e=exact: e(x, y.double(), counts.double()).squeeze(),
            x,
            ~counts,
            bound,
        )


def hausdorff(x: Tensor, y: Tensor, counts: Tensor, activation: str) -> Tensor:
    """The loss of each region by scipy's distances, where what does not count is background, and its mean is over what counts."""
    from scipy.ndimage import distance_transform_edt as edt

    p = x.softmax(1) if activation == "softmax" else x.sigmoid()

    def distances(region: Tensor) -> Tensor:
        found = torch.zeros(region.shape, dtype=torch.float64)
        for i, c in ((i, c) for i in range(2) for c in range(4)):
            each = region[i, c].cpu().numpy()
            if each.any() and not each.all():
                found[i, c] = torch.from_numpy(edt(each) + edt(~each))
        return found.to(x.device)

    far = distances((p.detach() > 0.5) & (counts > 0)).square() + distances((y > 0.5) & (counts > 0)).square()
    return ((p - y).square() * far * counts).sum((2, 3)) / counts.sum((2, 3))


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("kind", ["index", "dense"])
@DTYPES
def test_hausdorff(kind, activation, dtype, bound, device):
    x, target, _, often = problem(dtype, device)
    x = 3 * x
    y = F.one_hot(target, 4).movedim(-1, 1).double()
    for mask, counts in ((often.to(dtype), often), (often > 0, (often > 0).long())):
        nothing = (counts == 0).unsqueeze(1)
        given = target.masked_fill(counts == 0, 99) if kind == "index" else y.to(dtype).masked_fill(nothing, NAN)
        for reduction in ("none", "mean", "sum"):
            agree(
                lambda x, g=given, m=mask, r=reduction: L.hausdorff_loss(x, g, reduction=r, activation=activation, mask=m),
                lambda x, c=counts, r=reduction: getattr(
                    hausdorff(x, y, c.unsqueeze(1).expand(x.shape), activation), {"none": "clone"}.get(r, r)
                )(),
                x,
                nothing,
                bound,
            )


def test_maps_of_what_counts(device):
    """The computed maps of a boundary loss take what does not count as background, of class indices and of masks alike."""
    x, target, _, often = problem(torch.float64, device)
    counts = often > 0
    y = F.one_hot(target, 4).movedim(-1, 1)
    region = y * counts.unsqueeze(1)
    maps = L.signed_distance_map(region).double()
    for given in (target.masked_fill(~counts, 99), y.masked_fill(~counts.unsqueeze(1), 1)):
        agree(
            lambda x, g=given: L.boundary_loss(x, g, reduction="none", mask=counts),
            lambda x: L.boundary_loss(x, maps, reduction="none", mask=counts),
            x,
            ~counts.unsqueeze(1),
            1e-6,
        )


def test_an_image_of_which_no_pixel_counts(device):
    """It adds 0 to a boundary or Hausdorff loss, and a mean over no element is nan, or 0 on demand."""
    x, target, y, _ = problem(torch.float32, device)
    counts = torch.ones(2, 5, 7, dtype=torch.bool, device=device)
    counts[0] = False
    for function in (L.boundary_loss, L.hausdorff_loss):
        value, g = differentiated(
            lambda x, f=function: f(x, target, reduction="none", mask=counts), x.index_fill(0, counts.new_zeros(1).long(), NAN)
        )
        assert not value[0].any()
        assert not g[0].any()
        assert error(value[1:], function(x[1:], target[1:], reduction="none")) < 1e-6
    none = torch.zeros_like(y, dtype=torch.bool)
    assert L.binary_cross_entropy_with_logits(x, y, mask=none).isnan()
    assert L.binary_cross_entropy_with_logits(x, y, mask=none, empty="zero") == 0


X, Y = torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 4, 4)
INDEX = torch.zeros(2, 4, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (
            TypeError,
            r"mask must be of dtype bool, or floating .*, got torch.int64: did you mean mask.bool\(\)\?",
            lambda: L.mse_loss(X, Y, mask=INDEX),
        ),
        (TypeError, "mask must be a tensor, got bool", lambda: L.dice_loss(X, INDEX, mask=True)),
        (
            ValueError,
            r"mask must broadcast to the shape of input, \(2, 3, 4, 4\), got \(2, 4, 4\)",
            lambda: L.mse_loss(X, Y, mask=INDEX > 0),
        ),
        (ValueError, "mask has no gradient", lambda: L.mse_loss(X, Y, mask=torch.ones(4, requires_grad=True))),
        (
            ValueError,
            r"mask must have shape \(2, 4, 4\), one entry a pixel, .* got \(2, 3, 4, 4\)",
            lambda: L.dice_loss(X, INDEX, mask=X > 0),
        ),
        (ValueError, r"mask must have shape \(2, 4, 4\), one entry a pixel, .* got \(2, 3, 4, 4\)", lambda: L.dice_loss(X, Y, mask=X > 0)),
        (
            ValueError,
            r"mask must have shape \(2, 4, 4\), one entry a pixel or that of input, got \(1, 3, 4, 4\)",
            lambda: L.dice_loss(X, Y, activation="sigmoid", mask=X[:1] > 0),
        ),
        (
            TypeError,
            "mask must be of dtype bool, because a pixel .*, got torch.float32",
            lambda: L.lovasz_softmax_loss(X, INDEX, mask=X[:, 0]),
        ),
    ],
)
def test_refused(kind, message, call):
    with pytest.raises(kind, match=message):
        call()
