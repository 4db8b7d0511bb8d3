"""Restore the state of the process that a training changes, for a program that continues after it."""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator

import torch
from PIL import Image

from lab.base.process import ENDING
from lab.base.seeds import host_state, set_host_state
from lab.data.images.files import most_pixels

LOGGERS = ("alembic", "mlflow", "mlflow.store.db.utils")


@contextlib.contextmanager
def left_as_found() -> Iterator[None]:
    """Restore after the block: handlers of signals, generators, torch's modes, Pillow's limit, the environment and MLflow's loggers."""
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING:
                stack.callback(signal.signal, number, signal.getsignal(number))
        stack.callback(set_host_state, host_state())
        if torch.cuda.is_initialized():
            stack.callback(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all())
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), warn_only=warn_only)
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        for name in ("benchmark", "allow_tf32"):
            stack.callback(setattr, torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
        stack.callback(setattr, Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
        stack.callback(most_pixels.cache_clear)  # so that the next training sets it again
        for name in LOGGERS:
            stack.callback(logging.getLogger(name).setLevel, logging.getLogger(name).level)
        stack.callback(_set_environment, dict(os.environ))
        yield


def _set_environment(wanted: dict[str, str]) -> None:
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    os.environ.update(wanted)
