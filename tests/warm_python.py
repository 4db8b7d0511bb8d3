#!/usr/bin/env -S python3 -IS
"""Run a script or a module as `python` does, but in a fork of the warm process, which has imported the libraries: see warm.py.

It ends as the fork does, hands it the signals that it gets, and takes it along when it is killed. It imports little, because it is to
start at once. What else is asked of Python, such as `-c` or a worker of a pool, Python itself does.
"""

import json
import os
import signal
import socket
import sys

MODULES = ("torch.distributed.run", "lab.sweep.launch")


def main() -> None:
    words = sys.argv[1:]
    while words and words[0] in ("-u", "-P"):
        words.pop(0)
    if words[0].startswith("-") and not (words[0] == "-m" and words[1] in MODULES):
        os.execv(os.environ["WARM_PYTHON"], [os.environ["WARM_PYTHON"], *sys.argv[1:]])
    asked = {"script": words[0], "words": words[1:], "cwd": os.getcwd(), "env": dict(os.environ)}
    text = json.dumps(asked).encode()
    warm = socket.socket(socket.AF_UNIX)
    warm.connect(os.environ["WARM_SOCKET"])
    socket.send_fds(warm, [len(text).to_bytes(8, "big")], [1, 2])
    warm.sendall(text)
    answers = warm.makefile()
    pid = int(answers.readline())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = int(answers.readline())
    if status < 0:  # killed by a signal
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
