"""What each process of tests/test_distributed.py does under torchrun, and the test itself in one process: train, and keep what came out.

`torchrun ... distributed_worker.py FOLDER`: each rank writes FOLDER/<case>-<rank>.pt.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

CPU = ["trainer.device=cpu", "data.augment=false", "tracking=none"]
PLAIN = [*CPU, "optim=sgd", "trainer.epochs=1", "optim.schedule.warmup_epochs=0"]
VIT = ["model=tiny_vit", "loss.class_weight=[1,2,1,1,3,1,1,1,0.5,1]", "data.class_weight={3: 2.0}", *PLAIN]
SCENES = [
    *("task=detection", "model.frozen_norm=true", *PLAIN, "data.train_scenes=7", "data.val_scenes=5", "data.workers=0"),
    *("data.scene_pixels=64", "data.digits=[1,3]", "data.digit_pixels=[14,24]"),
]
SMALL = ["model=tiny_resnet", *PLAIN]
LABELS = [
    *("task=multilabel", "loss=bce", "data=digit_scenes", "data.train_scenes=4", "data.val_scenes=9", "data.scene_pixels=32"),
    *("data.digits=[1,2]", "data.digit_pixels=[10,16]", "data.workers=0", *SMALL),
]
NINE = ["data=folder", "data.image_size=32", "data.batch_size=4", "data.eval_batch_size=1", "data.workers=0", *SMALL]
PAIRS = [
    "task=preference",
    "loss=bradley_terry",
    "data=digit_pairs",
    "data.train_pairs=8",
    "data.val_pairs=37",
    "data.image_size=16",
    *SMALL,
]
FSDP, FUSED = "trainer.parallel=fsdp", "loss.fused_head=true"
PARTLY = ["model.freeze=[blocks.0,patch_embed]", "model.checkpoint_activations=true"]
LONG = [
    "model=tiny_vit",
    "model.drop_rate=0.2",
    "trainer.device=cpu",
    "data.mixup=0.3",
    "trainer.max_updates=6",
    "trainer.log_every=3",
    "data.test=0.1",
]
RUN = ["model=tiny_resnet", "data.image_size=16", "trainer.device=cpu", "trainer.max_updates=6", "trainer.ema=0.9", "trainer.accumulate=2"]


def assembled(*words: str) -> Any:
    from lab.config.settings import load
    from lab.training.assemble import assemble

    return assemble(load(list(words)))


def state_of(trainer: Any) -> dict[str, Any]:
    from lab.processes.parallel import whole_state

    # whole_state hands out the tensors themselves where they are whole
    state = {"model": trainer.model.state_dict(), "optimizer": trainer.updater.state()["optimizer"]["state"]}
    return torch.utils._pytree.tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, whole_state(state))


def updated(trainer: Any, first: int = 3) -> dict[str, Any]:
    """After the first updates of an epoch and its last, which has fewer samples: the sums of each, and the state of all."""
    groups, windows = list(trainer.groups()), []
    for group in (*groups[:first], groups[-1]):
        trainer.update(group)
        windows.append(trainer.window.clone())
        trainer._clear_window()
    spread = sum(type(parameter).__name__ == "DTensor" for parameter in trainer.model.parameters())
    return {"updates": len(groups), "windows": torch.stack(windows), "spread": spread, **state_of(trainer)}


def evaluated(trainer: Any) -> dict[str, Any]:
    result = trainer.evaluate(trainer.model, trainer.data.val)
    return {"values": result.values, "confusion": getattr(result, "confusion", None)}


def one_rank_is_not_finite(trainer: Any) -> dict[str, Any]:
    """An update of finite losses, and one whose batch is bad on the last rank alone."""
    from lab.processes import distributed

    first, second = list(trainer.groups())[:2]
    trainer.update(first)
    before = state_of(trainer)
    if distributed.rank() == distributed.ranks() - 1:
        second[0].images[0] = torch.nan
    trainer.update(second)
    evidence = distributed.from_largest(trainer.guard.evidence(), "update")
    return {"before": before, "after": state_of(trainer), "bad": trainer.guard.total.item(), "evidence": evidence}


def statistics(trainer: Any) -> dict[str, Any]:
    """A batch norm's running mean of each rank's own, and what an evaluation makes of them."""
    for group in list(trainer.groups())[:2]:
        trainer.update(group)
    name, own = next((name, value.clone()) for name, value in trainer.model.named_buffers() if name.endswith("running_mean"))
    return evaluated(trainer) | {"own": own, "averaged": dict(trainer.model.named_buffers())[name].clone()}


def rest(trainer: Any) -> dict[str, Any]:
    return updated(trainer) | evaluated(trainer)


def continued(folder: Path, *words: str) -> dict[str, Any]:
    """A training without a stop, and one that the last rank is asked to stop and that goes on from its checkpoint."""
    from lab.base.process import Stop, StoppedError
    from lab.processes import distributed
    from lab.run import checkpoint
    from lab.run.folder import RunFolder
    from lab.training.console import Console
    from lab.training.session import NoFolder

    first = distributed.rank() == 0
    console = Console(1, quiet=True)
    # the folder that is the first rank's to write to is known to all, as it is to who resumes
    run = RunFolder(folder / "runs", "straight", {}) if first else NoFolder()
    straight = assembled(*words)
    straight.fit(run, console)
    run = RunFolder(folder / "runs", "stopped", {}) if first else NoFolder()
    path = distributed.broadcast(run.path if first else None) / "checkpoints" / "last.pt"
    stop = Stop(checkpoint_first=True, quiet=True)
    if distributed.rank() == distributed.ranks() - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    stopped = assembled(*words)
    try:
        stopped.fit(run, console, stop)
    except StoppedError:
        at = stopped.done
    resumed = assembled(*words)
    state = checkpoint.load(path)
    resumed.restore(state)
    resumed.fit(run, console)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    kinds = {type(value).__name__ for value in torch.utils._pytree.tree_leaves(state["optimizer"])}
    tested = [{name: value for name, value in each.values.items() if name.startswith("test/")} for each in (straight, resumed)]
    about = {"stopped at": at, "kinds": sorted(kinds), "path": str(path), "tested": tested}
    return {"straight": state_of(straight), "resumed": state_of(resumed)} | about


CASES: dict[str, Any] = {
    "ddp": lambda folder: updated(assembled(*VIT, "data.batch_size=32")),
    "accumulated": lambda folder: updated(assembled(*VIT, "data.batch_size=8", "trainer.accumulate=4")),
    "fsdp": lambda folder: updated(assembled(*VIT, "data.batch_size=32", FSDP)),
    "fsdp accumulated": lambda folder: updated(assembled(*VIT, "data.batch_size=8", "trainer.accumulate=4", FSDP)),
    "fused ddp": lambda folder: updated(assembled(*VIT, FUSED, "data.batch_size=32")),
    "fused fsdp": lambda folder: updated(assembled(*VIT, FUSED, "data.batch_size=8", "trainer.accumulate=4", FSDP)),
    "frozen ddp": lambda folder: updated(assembled(*VIT, *PARTLY, "data.batch_size=32")),
    "frozen fsdp": lambda folder: updated(assembled(*VIT, *PARTLY, "data.batch_size=32", FSDP)),
    "bad ddp": lambda folder: one_rank_is_not_finite(assembled("model=tiny_vit", *CPU)),
    "bad fsdp": lambda folder: one_rank_is_not_finite(assembled("model=tiny_vit", *CPU, FSDP, "optim.clip=1.0")),
    "evaluated": lambda folder: evaluated(assembled(*VIT, "data.eval_batch_size=50")),
    "evaluated fsdp": lambda folder: evaluated(assembled(*VIT, "data.eval_batch_size=50", FSDP)),
    "statistics": lambda folder: statistics(assembled("model=tiny_resnet", "data.image_size=16", *PLAIN)),
    "rest": lambda folder: rest(assembled(*NINE, f"data.root={folder}/nine")),
    "scenes": lambda folder: updated(assembled(*SCENES, f"data.root={folder}", "data.batch_size=2"), first=1),
    "evaluated scenes": lambda folder: evaluated(assembled(*SCENES, f"data.root={folder}", "data.eval_batch_size=2")),
    "evaluated labels": lambda folder: evaluated(assembled(*LABELS, f"data.root={folder}/labels", "data.eval_batch_size=2")),
    "evaluated pairs": lambda folder: evaluated(assembled(*PAIRS, "data.eval_batch_size=5")),
    "continued": lambda folder: continued(folder, *LONG),
    "continued fsdp": lambda folder: continued(folder, *LONG, FSDP),
}


def main(folder: Path) -> int:
    from train import main as train

    for name, case in CASES.items():
        result = case(folder)
        torch.save(result, folder / f"{name}-{torch.distributed.get_rank()}.pt")
    return train([*RUN, f"tracking.uri=sqlite:///{folder}/mlflow.db", f"trainer.runs={folder}/run"])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))
    sys.exit(main(Path(sys.argv[1])))
