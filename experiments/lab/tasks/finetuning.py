"""Fine-tuning: initial weights from a file, and frozen parts."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from lab.base.errors import UserError, unknown
from lab.base.paths import ROOT, absolute
from lab.run.saved import file_of, read_checkpoint, refuse_nan

BACKBONE = "backbone"
MEASURED = ("target_mean", "target_deviation")
"""Buffers that a model of numbers has from its training data; a file of weights may lack them."""


def classifier_names(model: nn.Module) -> list[str]:
    """Return the names of parameters whose sizes depend on the number of classes, if the model names its classifier."""
    head = getattr(model, "get_classifier", lambda: None)()
    heads = head if isinstance(head, (tuple, list)) else [head]
    own = {id(parameter) for each in heads if isinstance(each, nn.Module) for parameter in each.parameters()}
    return [name for name, parameter in model.named_parameters() if id(parameter) in own]


def freeze(model: nn.Module, patterns: list[str]) -> str:
    """Freeze the parameters that `patterns` name; return a text with the number of trained ones.

    Raises:
        UserError: a pattern matches nothing, or no parameter is left to train.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns:
        if pattern == BACKBONE and not hasattr(model, BACKBONE):
            classifier = classifier_names(model)
            if not classifier:
                raise UserError(f"model.freeze=[{BACKBONE}]: {type(model).__name__} does not say which part is its classifier; name parts.")
            names = [name for name in parameters if name not in classifier]
        else:
            names = [name for name in parameters if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
        if not names:
            raise unknown(f"model.freeze=[{pattern}]", pattern, {BACKBONE, *(name.partition(".")[0] for name in parameters)})
        for name in names:
            parameters[name].requires_grad_(False)
    trained = sum(each.numel() for each in parameters.values() if each.requires_grad)
    if not trained:
        raise UserError(f"model.freeze={patterns}: nothing is left to train.")
    return f"trains {trained:,} of {sum(each.numel() for each in parameters.values()):,} parameters (model.freeze)"


def frozen_norms(model: nn.Module) -> list[nn.Module]:
    """Return the norm layers whose weights are not trained, because their running statistics must not change either."""
    norms = [module for module in model.modules() if isinstance(getattr(module, "running_mean", None), Tensor)]
    own = [(norm, [each.requires_grad for each in norm.parameters(recurse=False)]) for norm in norms]
    return [norm for norm, trained in own if trained and not any(trained)]


def load_own_weights(model: nn.Module, given: str) -> str:
    """Load the weights of the file `given` into the model; return a text about those that were left out.

    A classifier of another size is not loaded. Of parts that only training uses, the model's `only_in_training`, either side may lack some.

    Raises:
        UserError: the file does not exist, or its weights do not fit.
    """
    setting = "model.weights"
    path = file_of(absolute(given, ROOT), setting)
    weights = _weights(read_checkpoint(path, setting), f"{setting}={path}")
    refuse_nan(weights, f"{setting}={path}")
    own = model.state_dict()
    resized = [name for name in classifier_names(model) if name in weights and weights[name].shape != own[name].shape]
    parts = tuple(f"{part}." for part in getattr(model, "only_in_training", ()))
    lacks, more = own.keys() - weights.keys() - {*MEASURED}, weights.keys() - own.keys()
    begun, dropped = ({name for name in names if name.startswith(parts)} for names in (lacks, more))
    for what, names in (
        ("lacks", lacks - begun),
        ("has, and the model does not,", more - dropped),
        ("has in another shape", {name for name in own if name in weights and weights[name].shape != own[name].shape} - {*resized}),
    ):
        if names:
            raise UserError(
                f"{setting}={path}: does not fit {type(model).__name__}; it {what} {_listed(names)}.\n"
                "Choose the model that these weights are of; only a classifier of another size is left out."
            )
    model.load_state_dict({name: value for name, value in weights.items() if name not in resized}, strict=False)
    said = {
        "left out, for another number of classes": resized,
        "left out, for a part that this model trains without": dropped,
        "begun anew, because the file lacks them": begun,
    }
    return "".join([f"begins with the weights of {path.name}", *(f"; {what}: {_listed(names)}" for what, names in said.items() if names)])


def _weights(state: Any, what: str) -> dict[str, Tensor]:
    """Return the weights of our checkpoint, averaged ones if it has them, or of another program's file."""
    from timm.models._helpers import clean_state_dict

    for name in ("ema", "state_dict_ema", "model_ema", "model", "state_dict"):
        if isinstance(state, dict) and isinstance(inner := state.get(name), dict):
            state = inner
            break
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{what}: holds no weights: a checkpoint of train.py, or a state_dict in .pt or .safetensors, is expected.")
    return clean_state_dict(state)  # without the prefixes of DataParallel and torch.compile


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
