"""From checked settings to a trainer that is ready to start."""

from torch import nn

from lab.data import load_data
from lab.machine import pick_device, seed_all
from lab.models import check_model_name, model_norm
from lab.optim import check_optimizer_name
from lab.settings import Settings
from lab.tasks import Classification
from lab.trainer import Trainer


def assemble(settings: Settings, model: nn.Module | None = None) -> Trainer:
    """Open the data, make the task, its model (unless one is given) and the trainer; nothing is written.

    Raises:
        UserError: a name or a value that only the libraries or the data could judge is wrong.
    """
    config = settings.config
    check_model_name(config.model.name)
    check_optimizer_name(config.optim.name)
    device = pick_device(config.trainer.device)
    seed_all(config.trainer)
    data = load_data(config.data, model_norm(config.model), device, config.trainer.seed)
    task = Classification(config, data, device)
    return Trainer(config, task, data, model or task.model(), device, settings.tree())
