"""A few cases of losses over two processes, in the default tier: forks begin at once. test_parallel and test_contrastive have all cases."""

import multiprocessing
import os
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parallel import several_processes as classes
from parallel import spread_features as features
from torch.distributed.device_mesh import init_device_mesh

from lossforge.losses import cross_entropy, linear_kl_div, plain_torch
from lossforge.losses.engine.parallel.shards import SummedGradient

SECONDS = 120


def rows(group):
    layout = classes.layouts()["uneven"]
    classes.check_rows(layout, "uneven", group, ("by entropy, outputs", "pair, smoothed", "weights of rows", "another ignored class"))
    classes.check_rows(classes.layouts()["padding alone"], "padding alone", group, ("smoothing alone", "probabilities of rows"))


def edges(group):
    """Compare equal logits of two processes, of which the first is the largest, and classes of probability 0, also all of a process."""
    layout = classes.layouts()["uneven"]
    x, target = torch.randn(4, layout.classes), torch.randint(layout.classes, (4,))
    x[0] = 1.0
    excluded = x.clone()
    excluded[1, target[1]] = -torch.inf
    halved = x.clone()
    halved[2, : layout.classes // 2 + 1], halved[3, layout.classes // 2 + 1 :] = -torch.inf, -torch.inf
    target[2], target[3] = layout.classes - 1, 0
    for given, options in (
        (x, {"outputs": ("correct", "argmax")}),
        (excluded, {"token_weight": "probability"}),
        (halved, {"outputs": ("lse", "entropy")}),
    ):
        whole, own = given.double().requires_grad_(), layout.part(given, 1).requires_grad_()
        expected = cross_entropy(whole, target, reduction="none", **options)
        found = cross_entropy(own, target, reduction="none", **options, group=group, classes=layout.classes)
        (wanted,) = classes.grads_of(expected, [whole])
        classes.compare(str(options), found, expected, classes.grads_of(found, [own]), [layout.of_own(wanted, 1)])


def without_kernels(group):
    layout = classes.layouts()["uneven"]
    with plain_torch():
        classes.check_rows(layout, "plain", group, ("mean",))
        features.check_losses(group, [3, 5], ("both sides", "siglip"), ("mean",))
    x, w, bias, teacher = (torch.randn(n, dtype=torch.float64) for n in ((4, 5), (layout.classes, 5), layout.classes, (4, layout.classes)))
    bias[1] = teacher[:, 1] = -torch.inf  # a class that neither has
    whole = linear_kl_div(x, w, teacher, bias, outputs=("entropy",))
    own = layout.part(w), layout.part(teacher, 1), layout.part(bias)
    found = linear_kl_div(x, *own, outputs=("entropy",), group=group, classes=layout.classes)
    torch.testing.assert_close(found.loss, whole.loss)
    torch.testing.assert_close(found.entropy, whole.entropy)


def summed_gradient(group):
    """Add up three processes' gradients in half precision: 1 and twice 2⁻⁸, of which a sum in bfloat16 would lose each."""
    x = torch.zeros(9, dtype=torch.bfloat16, requires_grad=True)
    own = torch.where(torch.arange(9) % 3 == dist.get_rank(), 1.0, 2.0**-8).bfloat16()
    (found,) = torch.autograd.grad(SummedGradient.apply(x, group), x, own)
    assert torch.equal(found, torch.full_like(found, 1 + 2.0**-7))


def tokens(group):
    classes.check_tokens(classes.layouts()["uneven"], "uneven", group)


def divergences(group):
    classes.check_divergences(classes.layouts()["uneven"], "uneven", group, ("js of rows", "kl and labels", "js in backward"))


def three_products(group):
    classes.check_three_products(group, slice(4, 5), (1.0,))


def dtensors(group):
    mesh = init_device_mesh("cpu", (2,))
    classes.check_dtensors(mesh)
    classes.check_errors(mesh)


def losses(group):
    features.check_losses(group, [3, 5], ("both sides", "siglip", "supcon", "supcon without labels"), ("mean", "none"))


EACH = (
    rows,
    edges,
    tokens,
    divergences,
    three_products,
    classes.check_precision,
    without_kernels,
    summed_gradient,
    dtensors,
    losses,
)
CHECKS = {each.__name__: each for each in EACH}


def in_process(check: str, rank: int, world: int, folder: Path) -> None:
    """Run a check as one process of a group, and write what went wrong."""
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        CHECKS[check](dist.group.WORLD)
    except BaseException:
        (folder / f"error_{rank}").write_text(traceback.format_exc(), encoding="utf-8")
    os._exit(0)  # gloo's threads are left as they are


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_parallel and test_contrastive run all cases on GPUs")
@pytest.mark.parametrize("check", CHECKS)
def test_several_processes_give_what_one_gives(check, tmp_path):
    context = multiprocessing.get_context("fork")
    world = 3 if check == "summed_gradient" else 2
    processes = [context.Process(target=in_process, args=(check, rank, world, tmp_path), daemon=True) for rank in range(world)]
    for each in processes:
        each.start()
    for each in processes:
        each.join(SECONDS)
    alive = [rank for rank, each in enumerate(processes) if each.is_alive()]
    for each in processes:
        each.kill()
    errors = [path.read_text(encoding="utf-8") for path in sorted(tmp_path.glob("error_*"))]
    assert not errors, "\n".join(errors)
    assert not alive
    assert [each.exitcode for each in processes] == [0] * world
