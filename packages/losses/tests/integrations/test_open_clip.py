"""open_clip's losses, patched, against open_clip's own, on one process and on two."""

import compared
import processes
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("open_clip")

from open_clip.loss import ClipLoss, CoCaLoss, DistillClipLoss, SigLipLoss

from lossforge.integrations import open_clip as ours
from lossforge.kernels import launch_counts


def features(*seeds):
    return [F.normalize(torch.randn(7, 16, generator=torch.Generator().manual_seed(seed)), dim=-1).requires_grad_() for seed in seeds]


def launched(kernel):
    return sum(count for name, count in launch_counts().items() if name.startswith(kernel))


def compare(loss, leaves, call, **how):
    compared.compare(ours.patch, lambda: call(loss), leaves, rtol=1e-5, **how)


@pytest.mark.parametrize("matrix", [True, False], ids=["one matrix", "none"])
@pytest.mark.parametrize(("shape", "output_dict"), [((), False), ((1,), True)], ids=str)
def test_clip_and_siglip(shape, output_dict, matrix, monkeypatch):
    """Float32 features have one matrix of similarities, up to a size; beyond it none."""
    monkeypatch.setattr(ours, "MATRIX", 49 if matrix else 48)
    image, text = features(0, 1)
    before = launched("similarity")
    scale, bias = torch.full(shape, 10.0).requires_grad_(), torch.full(shape, -3.0).requires_grad_()
    given = {"output_dict": output_dict}
    compare(ClipLoss(), [image, text, scale], lambda loss: loss(image, text, scale, **given))
    compare(ClipLoss(), [image, text, scale], lambda loss: loss(image, text, scale, logit_bias=bias.detach(), **given))
    compare(SigLipLoss(), [image, text, scale, bias], lambda loss: loss(image, text, scale, bias, **given))
    compare(SigLipLoss(), [image, text, scale], lambda loss: loss(image, text, scale, None, **given))
    compare(SigLipLoss(), [image, text, scale], lambda loss: loss(image, text, scale, -2.0, **given))
    assert (launched("similarity") > before) == (not matrix)


def test_the_contrastive_part_of_coca():
    image, text = features(0, 1)
    scale, logits = torch.tensor(5.0, requires_grad=True), torch.randn(7, 4, 11, requires_grad=True)
    labels = torch.randint(11, (7, 4))
    compare(CoCaLoss(2.0, 1.0), [image, text, scale, logits], lambda loss: loss(image, text, logits, labels, scale))


def test_distillation_stays_open_clips():
    image, text, *teacher = features(0, 1, 2, 3)
    scale = torch.tensor(5.0, requires_grad=True)
    compare(DistillClipLoss(), [image, text, scale], lambda loss: loss(image, text, scale, *teacher, 9.0), differs=False)


class Scaled(ClipLoss):
    def get_logits(self, *args, **kwargs):
        return tuple(2 * logits for logits in super().get_logits(*args, **kwargs))


@pytest.mark.parametrize("case", ["subclass", "bias"])
def test_what_ours_lacks_is_left_to_open_clip(case, caplog):
    image, text = features(0, 1)
    bias = torch.tensor(-3.0, requires_grad=True)
    if case == "subclass":
        compare(Scaled(), [image, text], lambda loss: loss(image, text, 5.0), exact=True)
        said = "Scaled has its own get_logits"
    else:
        compare(ClipLoss(), [image, text, bias], lambda loss: loss(image, text, 5.0, bias), exact=True)
        said = "logit_bias requires grad, and ours has no gradient for it"
    assert [each.message for each in caplog.records if "own" in each.message] == [f"open_clip's own ClipLoss.forward runs: {said}"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_every_distributed_variant(count, tmp_path):
    assert "8 variants have open_clip's numbers" in processes.run("open_clip_runs.py", processes=count, folder=tmp_path)
