"""TRL with our losses against TRL without: each function, and every number that the trainers log."""

import pytest
import torch
from processes import run

pytest.importorskip("trl")

from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.gold.gold_trainer import GOLDTrainer
from trl.trainer import distillation_trainer, utils

from lossforge.integrations import trl as ours

SEED = 5


def compare(theirs, found, tensors, differentiable, rtol=1e-4, **given):
    """Compare results, and gradients of the tensors at the given positions under random upstream gradients."""
    both = []
    for function in (theirs, found):
        inputs = [t.clone().requires_grad_() if i in differentiable else t for i, t in enumerate(tensors)]
        results = function(*inputs, **given)
        results = results if isinstance(results, tuple) else (results,)
        generator = torch.Generator().manual_seed(SEED)
        sum((t * torch.randn(t.shape, generator=generator)).sum() for t in results if t is not None and t.requires_grad).backward()
        both.append((tuple(None if t is None else t.detach() for t in results), [inputs[i].grad for i in differentiable]))
    torch.testing.assert_close(both[1], both[0], rtol=rtol, atol=2e-5)


@pytest.fixture
def layer():
    return torch.randn(13, 16), torch.randn(57, 16), torch.randn(57), torch.randint(57, (13,))


@pytest.mark.parametrize("outputs", [ours.OUTPUTS, ("entropy",), ()], ids=["all", "entropy", "none"])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("bias", [False, True])
def test_log_probabilities(layer, outputs, softcap, bias):
    x, w, b, target = layer
    given = (target, 0.7, 32, softcap, 0.5, outputs)
    theirs = utils._ChunkedLogProbFunction.apply
    with ours.patch():
        found = utils._ChunkedLogProbFunction.apply
        assert found is not theirs
        tensors = (x, w, b if bias else None, *given)
        compare(theirs, found, tensors, (0, 1, 2) if bias else (0, 1))


@pytest.mark.parametrize("caps", [(None, None), (3.0, None), (None, 2.0)], ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergences(layer, beta, caps):
    x, w, b, _ = layer
    if not hasattr(distillation_trainer, "ChunkedDivergenceFunction"):
        pytest.skip("TRL has it since 1.16")
    theirs = distillation_trainer.ChunkedDivergenceFunction.apply
    with ours.patch():
        tensors = (x, w, b, x * 2, w + 0.1, b.flip(0), beta, 0.7, 0.5, caps[0], 2.0, caps[1])
        compare(theirs, distillation_trainer.ChunkedDivergenceFunction.apply, tensors, (0, 1, 2))


@pytest.mark.parametrize("masked", [False, True])
def test_functions_of_logits(masked):
    logits, index = torch.randn(3, 7, 57), torch.randint(57, (3, 7))
    several = torch.randint(57, (3, 7, 4))
    given = {"temperature": 0.6, "row_mask": torch.rand(3, 7) > 0.5} if masked else {}
    own = utils.selective_log_softmax, utils.selective_log_softmax_and_entropy, utils.entropy_from_logits
    with ours.patch():
        compare(own[0], utils.selective_log_softmax, (logits, index), (0,), **given)
        compare(own[1], utils.selective_log_softmax_and_entropy, (logits, index), (0,), **given)
        compare(own[1], utils.selective_log_softmax_and_entropy, (logits, index), (0,), entropy_requires_grad=False, **given)
        if not masked:
            compare(own[0], utils.selective_log_softmax, (logits, several), (0,))
            compare(own[2], utils.entropy_from_logits, (logits,), (0,))
        with pytest.raises(ValueError, match="temperature must be positive"):
            utils.selective_log_softmax(logits, index, temperature=0.0)


@pytest.mark.parametrize("trainer", [GKDTrainer, GOLDTrainer])
@pytest.mark.parametrize("reduction", ["batchmean", "sum", "mean", "none"])
@pytest.mark.parametrize("beta", [0, 0.3, 1])
def test_generalized_jsd(trainer, reduction, beta):
    student, teacher = torch.randn(3, 7, 57), torch.randn(3, 7, 57)
    labels = torch.where(torch.rand(3, 7) > 0.5, 1, -100)
    theirs = trainer.generalized_jsd_loss
    with ours.patch():
        for chosen in (None, labels, torch.full_like(labels, -100)):
            for count in (None, torch.tensor(9), 9):
                given = {"labels": chosen, "num_items_in_batch": count}
                if reduction == "mean" and count is None and chosen is not None and not (chosen >= 0).any():
                    continue  # a mean of nothing
                compare(
                    theirs, trainer.generalized_jsd_loss, (student, teacher), (0,), beta=beta, temperature=1.3, reduction=reduction, **given
                )


@pytest.mark.slow
def test_every_logged_number_of_one_process(tmp_path):
    printed = run("trl_runs.py", "all", folder=tmp_path)
    assert printed.count("equal:") > 45


@pytest.mark.slow
def test_every_logged_number_of_two_processes(tmp_path):
    """Accumulation 1 and 4, uneven rows, three architectures: where a recipe that divides once more would show."""
    printed = run("trl_runs.py", "few", processes=2, folder=tmp_path)
    assert printed.count("equal:") > 40
