"""Cases of test_two_processes, each run by the processes of a group: a few of those that test_parallel and test_contrastive run."""

import importlib.util
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parallel import several_processes as classes
from parallel import spread_features as features
from torch.distributed.device_mesh import init_device_mesh

from lossforge import kernels
from lossforge.losses import cross_entropy, linear_kl_div, plain_torch
from lossforge.losses.engine.parallel.shards import SummedGradient


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
    x[0, 0], x[2, -1] = torch.nan, torch.inf  # of one process; the loss and the gradient of all are nan
    own = layout.part(x, 1).requires_grad_()
    found = cross_entropy(own, target, reduction="none", group=group, classes=layout.classes)
    (grad,) = classes.grads_of(found, [own])
    rows = torch.tensor([True, False, True, False])
    assert torch.equal(found.isnan(), rows)
    assert torch.equal(grad.isnan(), rows.unsqueeze(1).expand_as(grad))


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
    classes.check_divergences(
        classes.layouts()["uneven"],
        "uneven",
        group,
        ("js of rows", "kl and labels", "js in backward", "draft of rows", "draft, tv and labels"),
    )


def top_k(group):
    classes.check_top_k(classes.layouts()["uneven"], "uneven", group, slice(2, 3))
    with plain_torch():
        classes.check_top_k(classes.layouts()["padding alone"], "padding alone", group)


def three_products(group):
    with pytest.MonkeyPatch.context() as patch:  # puts back what the check changes
        launch = kernels.load("linear.launch")
        patch.setattr(launch, "WORK", launch.WORK)
        patch.setattr(launch, "programs", launch.programs)
        classes.check_three_products(group, slice(4, 5), (1.0,))


def dtensors(group):
    mesh = init_device_mesh("cpu", (2,))
    classes.check_dtensors(mesh)
    classes.check_errors(mesh)


def losses(group):
    features.check_losses(group, [3, 5], ("both sides", "siglip", "supcon", "supcon without labels"), ("mean", "none"))


def batches(group):
    """Compare losses of a whole batch over three processes, of which one has nothing."""
    names = (
        "multi similarity",
        "mined pairs",
        "circle",
        "proxies",
        "barlow twins",
        "fewer features",
        "vicreg",
        "koleo",
        "centre",
        "sinkhorn",
        "sinkhorn by kernels",
    )
    features.check_losses(group, [5, 0, 3], names, ("mean", "none"))


EACH = (
    rows,
    edges,
    tokens,
    divergences,
    top_k,
    three_products,
    classes.check_precision,
    without_kernels,
    summed_gradient,
    dtensors,
    losses,
    batches,
)
CHECKS = {each.__name__: each for each in EACH}


def quicken() -> None:
    """Give Triton's interpreter its memory, as conftest.py does."""
    spec = importlib.util.spec_from_file_location("quick_interpreter", Path(__file__).parents[4] / "quick_interpreter.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.quicken()


def in_process(pipe, rank: int, world: int, folder: Path) -> None:
    """Run the checks that arrive, as one process of a group, and answer what went wrong."""
    torch.set_num_threads(1)
    quicken()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    while True:
        check = pipe.recv()
        try:
            torch.manual_seed(0)
            torch.use_deterministic_algorithms(True, warn_only=True)  # memory that torch.empty hands out is nan
            CHECKS[check](dist.group.WORLD)
            dist.barrier()
            pipe.send("")
        except BaseException:
            pipe.send(traceback.format_exc())
