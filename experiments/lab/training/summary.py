"""What a run says of its disk space at its start, and its final table."""

from typing import Any

from lab.config.schema import BEST
from lab.run.export import exports
from lab.training.console import clock
from lab.training.trainer import Trainer

STATES = {"adam": 2, "adamw": 2, "lamb": 2, "nadamw": 2, "lion": 1, "sgd": 1}
"""How many tensors of a parameter's size these optimisers keep for it."""


def kept_on_disk(trainer: Any) -> str:
    """Return in words what the checkpoints of a run will take."""
    config, settings = trainer.config, trainer.settings
    weights = sum(each.numel() * each.element_size() for each in trainer.model.state_dict().values())
    trained = sum(each.numel() * each.element_size() for each in trainer.model.parameters() if each.requires_grad)
    checkpoint = weights * (1 if trainer.ema is None else 2)
    whole = checkpoint + trained * STATES.get(config.optim.name.lower(), 0)
    sizes = {"last.pt": whole, "best.pt": checkpoint, "best.safetensors": weights}
    if exports(config):
        sizes |= {"best.pt2": weights} if config.tracking.model else {}
        sizes |= {"best.onnx": weights} if config.export.format == "onnx" else {}
    if settings.kept_epochs:
        sizes[f"{settings.kept_epochs} epoch-*.pt"] = whole * settings.kept_epochs
    listed = ", ".join(f"{name} {in_mib(size)}" for name, size in sizes.items())
    said = f"checkpoints will take about {in_mib(sum(sizes.values()))}: {listed}"
    if config.optim.name.lower() not in STATES:
        said += "; last.pt holds the optimiser's state, too"
    return said + (
        "; last.pt is deleted at the end (trainer.keep=best)" if settings.keep == BEST else "; trainer.keep=best deletes last.pt at the end"
    )


def in_mib(size: float) -> str:
    return f"{size / 2**20:,.{0 if size >= 10 * 2**20 else 1}f} MiB"


def delete_last(trainer: Any) -> None:
    """Delete a finished run's last.pt, by which it could go on, if trainer.keep=best and there is a best checkpoint."""
    folder = trainer.folder.path / "checkpoints"
    if trainer.settings.keep == BEST and (folder / "best.pt").is_file():
        (folder / "last.pt").unlink(missing_ok=True)


def rows(trainer: Trainer, values: dict[str, Any]) -> dict[str, str]:
    """Return the run's results and costs; a figure that the run does not have has no row.

    Args:
        trainer: the trainer after its run.
        values: the last value of each of the run's metrics.
    """
    best = trainer.best
    table = {}
    if best.values is not None:
        table = trainer.task.rows(best.values) | {
            "held-out loss": f"{best.values['loss']:.4f}",
            "best epoch": f"{best.epoch} of {trainer.settings.epochs}: that of the held-out figures",
            "held out": f"{trainer.data.val.samples} samples{trainer.data.held_out and f': {trainer.data.held_out}'}",
        }
    if trainer.monitor.gives_up:
        since = f"{best.stale} evaluations without a better {trainer.monitor.name} (trainer.patience)"
        table["ended early"] = f"after epoch {trainer.epoch} of {trainer.settings.epochs}: {since}"
    if trainer.data.test is not None and (tested := {name[5:]: value for name, value in values.items() if name.startswith("test/")}):
        table["test"] = f"{trainer.data.test.samples} samples, scored once with the best epoch's weights; loss {tested['loss']:.4f}"
        table |= {f"test {name.removeprefix('held-out ')}": value for name, value in trainer.task.rows(tested).items()}
    if "train/loss" in values:
        table["training loss"] = f"{values['train/loss']:.4f}, the mean of the last updates"
    speed = values.get("images_per_second")
    table["images/s"] = "too short a run to tell" if speed is None else f"{speed:,.0f}"
    if "data_wait_share" in values:
        table["waiting for data"] = f"{values['data_wait_share']:.1%} of a step's time"
    if "update_ms" in values:
        table["update"] = f"{values['update_ms']:,.1f} ms, the median"
    if "loss_ms" in values:
        table["loss forward + backward"] = f"{values['loss_ms']:.3f} ms by {trainer.kernels.summary()}"
    if "train/peak_process_mib" in values:
        place = "allocated on the GPU" if (allocated := values.get("train/peak_allocated_mib")) is not None else "of the process"
        table["peak memory"] = f"{values['train/peak_process_mib'] if allocated is None else allocated:,.0f} MiB {place}"
    skipped, nonfinite = (values.get(f"train/{name}", 0) for name in ("skipped_updates", "nonfinite_updates"))
    table["skipped updates"] = f"{skipped:.0f}, of them {nonfinite:.0f} without a finite loss or gradient"
    if "seconds" in values:
        table["time"] = clock(values["seconds"])
    return table
