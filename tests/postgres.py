"""A real Postgres for tests, in a folder of its own: Debian's package, run by a user who is not root."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path


def binaries() -> Path | None:
    """The folder that holds initdb and pg_ctl, of the newest version there is."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    return Path(path).parent if (path := shutil.which("initdb")) else None


class Postgres:
    """One cluster with a database and user `mlflow`, on a port of its own; raises CalledProcessError where it does not start."""

    def __init__(self, password: str = "secret") -> None:
        where = binaries()
        assert where is not None
        self.password = password
        self.bin = where
        self.folder = Path(tempfile.mkdtemp(prefix="postgres-"))  # not pytest's: its folders are closed to other users
        self.as_user: list[str] = []
        if os.geteuid() == 0:
            user = pwd.getpwnam("postgres")
            os.chown(self.folder, user.pw_uid, user.pw_gid)
            self.as_user = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"postgresql+psycopg2://mlflow:{password}@127.0.0.1:{self.port}/mlflow"

    def start(self) -> "Postgres":
        (self.folder / "password").write_text(self.password, encoding="utf-8")
        if self.as_user:
            shutil.chown(self.folder / "password", "postgres", "postgres")
        data = str(self.folder / "data")
        self._run("initdb", "-D", data, "-U", "mlflow", "--auth=scram-sha-256", f"--pwfile={self.folder / 'password'}", "--no-sync")
        options = f"-h 127.0.0.1 -p {self.port} -k {self.folder} -F"
        self._run("pg_ctl", "-D", data, "-w", "-l", str(self.folder / "log"), "-o", options, "start")
        self.psql("create database mlflow", "postgres")
        return self

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-m", "immediate", "stop")
        shutil.rmtree(self.folder)

    def psql(self, query: str, database: str = "mlflow") -> str:
        """The rows of a query, as psql prints them without a frame."""
        words = ["-h", "127.0.0.1", "-p", str(self.port), "-U", "mlflow", "-d", database, "-Atqc", query]
        return self._run("psql", *words).strip()

    def dump(self) -> str:
        """All that the database holds, as SQL."""
        return self._run("pg_dump", "-h", "127.0.0.1", "-p", str(self.port), "-U", "mlflow", "mlflow")

    def _run(self, program: str, *words: str) -> str:
        env = {**os.environ, "PGPASSWORD": self.password, "LC_ALL": "C"}
        command = [*self.as_user, str(self.bin / program), *words]
        # what Postgres leaves running must not hold the pipe that is read here
        with tempfile.TemporaryFile("w+") as out:
            subprocess.run(command, cwd=self.folder, env=env, stdout=out, stderr=subprocess.STDOUT, check=True, timeout=120)
            out.seek(0)
            return out.read()
