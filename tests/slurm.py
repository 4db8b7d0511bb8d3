"""A real Slurm of one node for tests, on the loopback address and in a folder of its own: Debian's slurmctld, slurmd, slurm-client.

It needs neither munge nor /etc/slurm: all programs find its configuration by SLURM_CONF. Daemons and jobs are this user's.
"""

import os
import platform
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "slurmstepd", "sbatch", "srun", "scontrol", "squeue")
CONFIGURATION = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
ReturnToService=2
# more processors than there are: the scripts ask for as many as they would where they are used
SlurmdParameters=config_overrides
GresTypes=gpu
JobRequeue=1
KillWait=30
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=gpu Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class SlurmError(Exception):
    """It does not start here; says why."""


def lacking() -> list[str]:
    """The programs that are not installed."""
    return [name for name in PROGRAMS if name != "slurmstepd" and shutil.which(name, path=search_path()) is None]


def search_path() -> str:
    return os.pathsep.join([os.environ["PATH"], "/usr/sbin"])


class Slurm:
    """A controller and a node. `env`: what a program needs to reach it."""

    def __init__(self, cpus: int = 32, gpus: int = 4) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.env = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": search_path()}
        self.daemons: list[subprocess.Popen[bytes]] = []
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        given = {
            "host": platform.node().partition(".")[0],
            "ports": free_ports(2),
            "user": pwd.getpwuid(os.geteuid()).pw_name,
            "folder": self.folder,
            "cpus": cpus,
            "gpus": gpus,
            "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**21,
        }
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format_map(given), encoding="utf-8")
        devices = [self.folder / f"gpu{number}" for number in range(gpus)]
        for device in devices:
            device.touch()
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in devices), encoding="utf-8")

    def start(self) -> "Slurm":
        """
        Raises:
            SlurmError: a daemon ended, or the node is not ready after a minute.
        """
        try:
            for name in ("slurmctld", "slurmd"):
                with (self.folder / f"{name}.out").open("wb") as out:
                    program = shutil.which(name, path=search_path())
                    self.daemons.append(
                        subprocess.Popen([str(program), "-D"], env=self.env, stdout=out, stderr=out, start_new_session=True)
                    )
            deadline = time.monotonic() + 60
            while "idle" not in self.run("sinfo", "-h", "-o", "%T", check=False).split():
                if time.monotonic() > deadline or any(daemon.poll() is not None for daemon in self.daemons):
                    raise SlurmError(self.said())
                time.sleep(0.2)
        except BaseException:
            self.stop()
            raise
        return self

    def cancel(self) -> None:
        """End all jobs, without time for last words."""
        user = f"--user={pwd.getpwuid(os.geteuid()).pw_name}"
        self.run("scancel", user, "--signal=KILL", "--full", check=False)
        self.run("scancel", user, check=False)
        deadline = time.monotonic() + 60
        while self.run("squeue", "-h", check=False) and time.monotonic() < deadline:
            time.sleep(0.2)

    def stop(self) -> None:
        """End the jobs and the daemons, and remove the folder."""
        if all(daemon.poll() is None for daemon in self.daemons):
            self.cancel()
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *words: str, check: bool = True, folder: Path | None = None, env: Mapping[str, str] | None = None) -> str:
        """What a program of Slurm prints; a job that it starts begins in this folder and has this environment."""
        done = subprocess.run(words, cwd=folder, env=env or self.env, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def jobs(self, *numbers: str) -> list[dict[str, str]]:
        """What `scontrol show job` says of each."""
        lines = self.run("scontrol", "--oneliner", "show", "job", *numbers).splitlines()
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]

    def said(self) -> str:
        """The ends of the daemons' logs."""
        logs = (path for name in ("slurmctld", "slurmd") for path in (self.folder / f"{name}.out", self.folder / f"{name}.log"))
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-1500:]}" for path in logs if path.exists())


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
