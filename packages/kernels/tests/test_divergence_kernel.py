"""The kernels of two softmaxes, and of one and a teacher's largest entries, over sizes, alignments and strides."""

import pytest
import torch

from lossforge import kernels
from lossforge.kernels.classes.calls import DivergenceCall, TopKCall
from lossforge.losses.formulas import FORMULAS

SHAPES = [(1, 1), (3, 17), (5, 300), (2, 7, 6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("loss", "hyper"), [("kl", []), ("js", [0.3]), ("total_variation", [])])
def test_divergences_over_sizes_and_alignment(judged, offset, device, loss, hyper, dtype):
    for shape in SHAPES:
        x, teacher = (2 * torch.randn(2, *shape, device=device)).to(dtype)
        for shift, reduction in ((0, "sum"), (1, "none"), (8, "sum")):
            judged(DivergenceCall(loss, offset(x, shift), offset(teacher, shift), hyper=hyper, temperature=1.5, reduction=reduction))
        judged(DivergenceCall(loss, x.transpose(0, 1).contiguous().transpose(0, 1), teacher, hyper=hyper, swap=loss == "kl"))


DRAFTS = [("draft_lk", [0.8, 2.0]), ("draft_log_tv", []), ("draft_tv", []), ("draft_kl", []), ("draft_ce", [])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("loss", "hyper"), DRAFTS, ids=[loss for loss, _ in DRAFTS])
def test_draft_losses_over_sizes_and_alignment(judged, offset, device, loss, hyper, dtype):
    for shape in [(3, 17), (2, 9001), (2, 7, 6)]:
        x, teacher = (2 * torch.randn(2, *shape, device=device)).to(dtype)
        lse = teacher.float().div(1.5).logsumexp(1) + torch.rand((shape[0], *shape[2:]), device=device)
        more = {"hyper": hyper, "temperature": 1.5, "outputs": [False, True]}
        for shift, reduction, given in ((8, "none", {}), (0, "sum", {}), (1, "none", {"target_lse": lse}))[2 * (shape[1] > 9000) :]:
            judged(DivergenceCall(loss, offset(x, shift), offset(teacher, shift), reduction=reduction, **more, **given))
        judged(DivergenceCall(loss, x.transpose(0, 1).contiguous().transpose(0, 1), teacher, target_lse=lse, **more))


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize(("loss", "hyper"), [("kl", []), ("js", [0.3]), ("total_variation", []), ("draft_overlap", [])])
def test_sums_over_some_of_the_classes(device, loss, hyper, swap):
    """With the statistics of all classes, the sums of two parts are those of all: of rows in one tile and in several."""
    launch, formulas = kernels.load("classes.divergence.launch"), FORMULAS[loss].kernels
    for classes, part in ((300, 17), (9001, 4600)):
        x, teacher = torch.randn(2, 3, classes, device=device)
        labels = torch.tensor([0, -100, 1], device=device)
        call = DivergenceCall(
            loss, x, teacher, labels, torch.rand(3, device=device), hyper=hyper, swap=swap, temperature=1.5, reduction="none"
        )
        value, *_, stats = launch.forward(call, formulas, [None], True)
        sums = torch.zeros(2, 3, device=device)
        for at in (slice(part), slice(part, classes)):
            own = torch.cat((stats[:4], torch.full_like(stats[4:], torch.nan)))
            (of_part,) = launch.sums_of(call._replace(x=x[:, at], target=teacher[:, at]), formulas, own)
            sums += torch.stack((of_part, own[4]))
        torch.testing.assert_close(sums[0], value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(sums[1], stats[4], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_largest_entries_over_sizes_and_alignment(judged, offset, device, dtype):
    for shape in SHAPES:
        x = torch.randn(shape, device=device).to(dtype)
        values, indices = torch.randn(shape, device=device).log_softmax(1).topk(min(3, shape[1]), 1)
        for shift, reduction in ((0, "sum"), (1, "none"), (8, "sum")):
            capped = {"softcap": 2.0, "logit_scale": 1.3}
            for options in ({}, {"renormalize": True, "logit_scale": 0.7}, {"renormalize": True, **capped}, {"tail": True}, capped):
                if options.get("tail") and shape[1] <= 3:
                    continue  # there are no further classes
                target = offset(values, shift).contiguous()
                judged(TopKCall("topk_kl", offset(x, shift), target, indices, temperature=1.5, reduction=reduction, **options))


def test_entries_that_are_no_log_probabilities_make_their_row_nan(device):
    launch, formulas = kernels.load("classes.topk"), FORMULAS["topk_kl"].kernels
    for classes in (17, 9001):
        x = torch.randn(3, classes, device=device)
        values, indices = torch.randn(3, classes, device=device).log_softmax(1).topk(5, 1)
        values[1] = 0.03 - torch.tensor(5.0).log()  # of a sum of 1.03, as of rounded ones
        values[2] = 0.06 - torch.tensor(5.0).log()
        call, gradient = TopKCall("topk_kl", x, values, indices), torch.zeros_like(x)
        total, *_ = launch.forward(call, formulas, [gradient], True)
        assert total.isnan()
        assert gradient.isnan().all(1).tolist() == gradient.isnan().any(1).tolist() == [False, False, True]
        each, *_ = launch.forward(call._replace(reduction="none"), formulas, [None], True)
        assert each.isnan().tolist() == [False, False, True]
