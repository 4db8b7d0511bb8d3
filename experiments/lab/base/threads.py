"""Threads beside the main one."""

import contextlib
import importlib
import threading


class Background(threading.Thread):
    """A daemon thread, some of whose modules are imported by the thread that starts it.

    sklearn and matplotlib look into sys.modules for pandas and IPython, and fail where they meet one that another thread is importing.

    Attributes:
        modules: which of those the thread imports, itself or by what it imports. One that does not import is left to the thread.
    """

    modules: tuple[str, ...] = ()

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)

    def start(self) -> None:
        for name in self.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        super().start()
