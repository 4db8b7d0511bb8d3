"""What a run keeps on disk: said at its start, and given back at its end where the user wants that."""

from typing import Any

from lab.config.schema import BEST
from lab.run.export import exports

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
