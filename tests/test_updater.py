"""Every optimiser of timm: a bad update changes nothing, the host reads at most one flag, and spread over processes it does as alone."""

import importlib.util
import math
import re

import pytest
import torch
from spread_training import STEPS, Training, alone, reads, resumed
from test_distributed import EXACT, ROOT, assert_same

from lab.base.errors import UserError
from lab.config.schema import SCHEDULES, OptimConfig, ScheduleConfig
from lab.optim.updater import BY_NUMBER, BY_TENSOR, check_optimizer, make_schedule

# decide on the host themselves, by the values of gradients, or read a tensor of their own making
READERS = {"adamp", "cadamp", "sgdp", "csgdp", "novograd", "kron"}


def one_of_each_kind():
    """Names of all timm's optimisers that are here, but for those that differ in options alone; second-order ones need another backward."""
    from timm.optim import get_optimizer_info, list_optimizers

    found = {}
    for name in list_optimizers():
        info = get_optimizer_info(name)
        if isinstance(info.opt_class, type) and not info.second_order:
            options = info.defaults or {}
            found.setdefault((info.opt_class, options.get("caution"), options.get("algo"), options.get("decoupled_weight_decay")), name)
    return sorted({*found.values(), "sgd", "lamb"})


def goes_spread(name):
    from timm.optim import get_optimizer_info

    info = get_optimizer_info(name)
    special = {"caution", "algo"} & set(info.defaults or {})
    return info.opt_class.__name__ in BY_NUMBER | BY_TENSOR and not special


def listed():
    """Return every name that optim.name takes, as its refusal lists them, and one of each of timm's prefixes."""
    with pytest.raises(UserError) as caught:
        check_optimizer(OptimConfig(name="?"))
    return [*str(caught.value).partition("Choices: ")[2].split(", "), "lookahead_adamw"]


NAMES = one_of_each_kind()
# one of every class that goes spread
SPREAD = [*(name for name in NAMES if goes_spread(name)), "lookahead_sgd"]
# RMSprop divides by gradients that are all but zero
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


@pytest.mark.parametrize("name", [*NAMES, "lookahead_sgd", "lookahead_radamlegacy"])
def test_bad_updates_leave_everything_as_it_was(name):
    training, never_bad = Training(name), Training(name)
    for number in range(STEPS):
        if number in (0, 3):
            before = training.state()
            training.step(number, bad=True)
            after = training.state()
            if training.updater.on_device and number == 0:  # fused ones have made their state, of zeros
                before, after = before["model"], after["model"]
            assert_same(after, before, **EXACT)
        training.step(number)
        if number == 4:
            training.step(number, bad=True)  # and the next step comes at once
        never_bad.step(number)
    assert_same(training.state(), never_bad.state(), **EXACT)
    assert not torch.equal(training.state()["model"]["head.bias"], Training(name).state()["model"]["head.bias"])


@pytest.mark.parametrize("name", [name for name in [*NAMES, "lookahead_sgd"] if name not in READERS])
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_the_host_reads_nothing_of_a_fused_step_and_one_flag_of_others(name, scaled):
    training = Training(name, scaled=scaled, clip=1.0)
    assert reads(training) == (0 if training.updater.on_device else 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_no_fused_step_waits_for_the_gpu(name):
    training = Training(name, device="cuda", clip=1.0)
    training.step(0)
    training.step(1, bad=True)
    bad_loss = training.gradients(2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.updater.step(bad_loss)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", NAMES)
def test_bad_updates_leave_everything_as_it_was_on_the_gpu(name):
    training = Training(name, device="cuda")
    training.step(0)
    before = training.state()
    training.step(1, bad=True)
    assert_same(training.state(), before, **EXACT)


@pytest.fixture(scope="module")
def spread(tmp_path_factory, torchrun):
    """What two processes came to, by optimiser; they also go on from a checkpoint that an unfused SGD left behind."""
    folder = tmp_path_factory.mktemp("spread")
    old = Training("sgd", clip=0.5, args={"fused": False})
    for number in range(3):
        old.step(number)
    torch.save({"model": old.model.state_dict(), **old.updater.state()}, folder / "old.pt")
    done = torchrun(ROOT / "tests/spread_training.py", folder, ",".join(SPREAD), ",".join(set(NAMES) - set(SPREAD)))
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(folder / "found.pt", weights_only=False)


@pytest.mark.parametrize("name", SPREAD)
def test_two_processes_step_as_one(spread, name):
    found, one = spread[name], alone(name)
    assert found["parts"] == (name not in ("lamb", "larc", "muon"))
    assert found["reads"] == (0 if Training(name).updater.on_device else 1)
    fused = Training(name).updater.on_device
    for number, (before, after) in enumerate(found["undone"]):
        parts = ["model"] if fused and number == 0 else ["model", "optimizer"]
        assert_same([after[part] for part in parts], [before[part] for part in parts], **EXACT)
    for part in ("model", "optimizer"):
        assert_same(found["end"][part], one[part], **CLOSE)
    # and its checkpoint is one process's
    continued = resumed(name, found["saved"], spread=False)
    for number in range(3, STEPS):
        continued.step(number)
    assert_same(continued.state(), one, **CLOSE)


def test_spread_fused_sgd_goes_on_from_what_an_unfused_one_left(spread):
    assert_same(spread["continued"]["model"], alone("sgd")["model"], **CLOSE)
    assert all(group["fused"] for group in spread["continued"]["optimizer"]["param_groups"])


@pytest.mark.parametrize("name", [name for name in NAMES if not goes_spread(name)])
def test_optimizers_that_cannot_be_spread_are_refused(spread, name):
    assert re.match(f"optim.name={name} takes figures of whole tensors.*Use trainer.parallel=ddp, or", spread["refused"][name])


def test_clipping_that_cannot_be_spread_is_refused(spread):
    assert re.match("optim.clip_mode=agc takes norms of whole tensors.*Use norm or value", spread["refused"]["agc"])


@pytest.mark.parametrize("name", listed())
def test_every_listed_optimizer_takes_an_update_or_says_what_it_lacks(name):
    check_optimizer(OptimConfig(name=name))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    package = re.match("(fused)|(bnb)", name)
    if package and not (torch.cuda.is_available() and importlib.util.find_spec("apex" if package[1] else "bitsandbytes")):
        with pytest.raises(UserError, match=f"optim.name={name} cannot be made with these settings: .*(APEX|bitsandbytes) optimizers"):
            Training(name, device=device)
        return
    training = Training(name, device=device)
    before = training.state()["model"]
    for number in range(2):  # Adopt only looks at the first gradients
        training.step(number)
    after = training.state()["model"]
    assert [key for key in after if not after[key].isfinite().all()] == []
    assert [key for key in after if torch.equal(before[key], after[key])] == []


@pytest.mark.parametrize("name", ["adahessian", "AdaHessian", "lookahead_adahessian"])
def test_an_optimizer_of_second_derivatives_is_refused(name):
    assert "adahessian" not in listed()
    with pytest.raises(UserError, match=f"optim.name={name}: takes second derivatives, which a training does not compute. Use for"):
        check_optimizer(OptimConfig(name=name))


def rates(updates, per_epoch, **schedule):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
    made = make_schedule(optimizer, OptimConfig(lr=1e-3, schedule=ScheduleConfig(**schedule)), updates, per_epoch)
    found = [optimizer.param_groups[0]["lr"]]
    for update in range(1, updates + 1):
        made.step_update(update)
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("name", sorted({*SCHEDULES} - {"range"}))  # which rises, and then ends
@pytest.mark.parametrize("epochs", [1, 2, 3])
@pytest.mark.parametrize("per_epoch", [1, 2, 23])
@pytest.mark.parametrize("warmup_epochs", [None, 0, 0.5])
def test_every_schedule_takes_few_epochs(name, epochs, per_epoch, warmup_epochs):
    found = rates(epochs * per_epoch, per_epoch, name=name, warmup_epochs=warmup_epochs)
    warmup = epochs * per_epoch // 10 if warmup_epochs is None else round(warmup_epochs * per_epoch)
    assert found[:warmup] == sorted(found[:warmup])
    assert found[warmup] == pytest.approx(1e-3, rel=1e-3 if name == "tanh" else 1e-6)
    assert found[warmup:] == sorted(found[warmup:], reverse=True)
    assert found[-1] >= 0
    assert (found[-1] < 1e-3) == (name not in ("step", "multistep", "constant"))  # whose first steps come after 90 epochs


@pytest.mark.parametrize(("decay_epochs", "decay"), [(None, 8), (1, 20)])
def test_wsd_and_rsqrt_end_with_their_decay(decay_epochs, decay):
    """40 updates after a warm-up of 10, the last `decay` of which fall to 0."""
    schedule = {"warmup_epochs": 0.5, "warmup_lr": 0, "decay_epochs": decay_epochs}
    progress = [max(0, t - (50 - decay)) / decay for t in range(10, 51)]
    wsd = [1e-3 * (1 - each**0.5) for each in progress]
    rsqrt = [1e-3 * (1 - each) * (1 + t / 10) ** -0.5 for t, each in enumerate(progress)]
    assert rates(50, 20, name="wsd", **schedule)[10:] == pytest.approx(wsd)
    assert rates(50, 20, name="rsqrt", **schedule)[10:] == pytest.approx(rsqrt)
    with pytest.raises(UserError, match=r"optim.schedule.decay_epochs=3: the run has 2 epochs after its warm-up; use fewer, or more train"):
        rates(50, 20, name="wsd", **(schedule | {"decay_epochs": 3}))


def test_cosine_and_poly_begin_after_the_warm_up_and_end_with_the_run():
    progress = [t / 40 for t in range(41)]
    cosine = [0.5e-3 * (1 + math.cos(math.pi * each)) for each in progress]
    assert rates(50, 20, name="cosine", warmup_epochs=0.5)[10:] == pytest.approx(cosine)
    poly = [1e-3 * (1 - each) ** 2 for each in progress]
    assert rates(50, 20, name="poly", warmup_epochs=0.5, decay_rate=2.0)[10:] == pytest.approx(poly)


def test_step_counts_epochs():
    found = rates(400, 2, name="step", warmup_epochs=0)
    assert [update for update in range(1, 401) if found[update] < found[update - 1]] == [180, 360]
