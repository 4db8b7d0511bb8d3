"""What each process of tests/test_distributed.py does under torchrun, and the test itself in one process: train, and keep what came out.

`torchrun ... distributed_worker.py FOLDER`: each rank writes FOLDER/<case>-<rank>.pt.
"""

import sys
from pathlib import Path
from typing import Any

import torch

PLAIN = ["trainer.device=cpu", "data.augment=false", "optim=sgd", "trainer.epochs=1", "optim.schedule.warmup_epochs=0", "tracking=none"]
VIT = ["model=tiny_vit", "loss.class_weight=[1,2,1,1,3,1,1,1,0.5,1]", "data.class_weight={3: 2.0}", *PLAIN]
SCENES = [
    *("task=detection", "model.frozen_norm=true", *PLAIN),
    *(
        "data.train_scenes=7",
        "data.val_scenes=5",
        "data.scene_pixels=64",
        "data.digits=[1,3]",
        "data.digit_pixels=[14,24]",
        "data.workers=0",
    ),
]


def assembled(*words: str) -> Any:
    from lab.assemble import assemble
    from lab.settings import load

    return assemble(load(list(words)))


def updated(trainer: Any, first: int = 3) -> dict[str, Any]:
    """After the first updates of an epoch and its last, which has fewer samples: the sums of each, and the state of all."""
    from lab.parallel import whole_state

    groups, windows = list(trainer.groups()), []
    for group in (*groups[:first], groups[-1]):
        trainer.update(group)
        windows.append(trainer.window.clone())
        trainer._clear_window()
    return {
        "updates": len(groups),
        "windows": torch.stack(windows),
        "model": whole_state(trainer.model.state_dict()),
        "optimizer": whole_state(trainer.updater.optimizer.state_dict()),
        "sharded": sum(type(p).__name__ == "DTensor" for p in trainer.model.parameters()),
    }


def evaluated(trainer: Any) -> dict[str, Any]:
    result = trainer.evaluate(trainer.model, trainer.data.val)
    return {"values": result.values, "confusion": getattr(result, "confusion", None)}


def one_rank_is_not_finite(trainer: Any) -> dict[str, Any]:
    """An update of finite losses, and one whose batch is bad on the last rank alone."""
    from lab import distributed
    from lab.parallel import whole_state

    first, second = list(trainer.groups())[:2]
    trainer.update(first)
    before = whole_state({"model": trainer.model.state_dict(), "optimizer": trainer.updater.optimizer.state_dict()})
    before = {name: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in part.items()} for name, part in before.items()}
    if distributed.rank() == distributed.ranks() - 1:
        second[0].images[0] = torch.nan
    trainer.update(second)
    after = whole_state({"model": trainer.model.state_dict(), "optimizer": trainer.updater.optimizer.state_dict()})
    evidence = distributed.of_highest(trainer.guard.evidence(), "update")
    return {"before": before, "after": after, "bad": trainer.guard.total.item(), "evidence": evidence}


def statistics(trainer: Any) -> dict[str, Any]:
    """A batch norm's running mean of each rank's own, and what an evaluation makes of them."""
    for group in list(trainer.groups())[:2]:
        trainer.update(group)
    name, own = next((name, value.clone()) for name, value in trainer.model.named_buffers() if name.endswith("running_mean"))
    return evaluated(trainer) | {"own": own, "averaged": dict(trainer.model.named_buffers())[name].clone()}


def main(folder: Path) -> None:
    from lab import distributed

    adamw = ["model=tiny_vit", "trainer.device=cpu", "data.augment=false", "tracking=none"]
    cases: dict[str, Any] = {
        "ddp": lambda: updated(assembled(*VIT, "data.batch_size=32")),
        "accumulated": lambda: updated(assembled(*VIT, "data.batch_size=8", "trainer.accumulate=4")),
        "fsdp": lambda: updated(assembled(*VIT, "data.batch_size=32", "trainer.parallel=fsdp")),
        "fsdp accumulated": lambda: updated(assembled(*VIT, "data.batch_size=8", "trainer.accumulate=4", "trainer.parallel=fsdp")),
        "bad ddp": lambda: one_rank_is_not_finite(assembled(*adamw)),
        "bad fsdp": lambda: one_rank_is_not_finite(assembled(*adamw, "trainer.parallel=fsdp", "optim.clip=1.0")),
        "evaluated": lambda: evaluated(assembled(*VIT, "data.eval_batch_size=50")),
        "evaluated fsdp": lambda: evaluated(assembled(*VIT, "data.eval_batch_size=50", "trainer.parallel=fsdp")),
        "statistics": lambda: statistics(assembled("model=tiny_resnet", "data.image_size=16", *PLAIN)),
        "scenes": lambda: updated(assembled(*SCENES, f"data.root={folder}", "data.batch_size=2"), first=1),
        "evaluated scenes": lambda: evaluated(assembled(*SCENES, f"data.root={folder}", "data.eval_batch_size=2")),
    }
    for name, case in cases.items():
        torch.save(case(), folder / f"{name}-{torch.distributed.get_rank() if torch.distributed.is_initialized() else 0}.pt")
    distributed.stop()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))
    main(Path(sys.argv[1]))
