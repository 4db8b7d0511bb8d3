"""Worker processes of data loaders: how many, and that what stops a run reaches them as well and must not end them."""

import multiprocessing
import os
import signal
import threading

from lab.train.ranks import launched_here

MOST = 16  # where a setting leaves it open


def number_of_workers(wanted: int | None) -> int:
    """As many as are wanted, but no more than there are cores; None: this process's share of the cores, up to MOST."""
    cores = len(os.sched_getaffinity(0))
    if wanted is None:
        return max(1, min(MOST, cores // launched_here()))
    return min(wanted, cores)


def shielded(_worker: int) -> None:
    """Called by each worker as it starts: let it end when the run's own process says so, and by no signal that all processes get.

    Ctrl-C goes to every process of the terminal's group, a scheduler's SIGTERM often to every process of the job; a worker that died of
    it would take the run with it before its checkpoint is written.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_the_run, daemon=True).start()


def _end_with_the_run() -> None:
    """The run's process ends its workers by SIGTERM, too."""
    run = multiprocessing.parent_process()
    while run is not None and signal.sigwaitinfo({signal.SIGTERM}).si_pid != run.pid:
        pass
    os._exit(0)
