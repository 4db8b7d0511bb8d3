"""Start compose.yaml's MLflow server: where it listens beyond this machine, it asks for a login.

usage: python3 serve_mlflow.py [option of `mlflow server` ...]

MLFLOW_ADDRESS is the address that its port is published on. Beyond this machine, or where there is an MLFLOW_PASSWORD, MLflow's own
basic-auth app runs, with MLFLOW_USER as the one who may do everything; the password is written anew at each start.
PGPASSWORD_FILE and AWS_SECRET_ACCESS_KEY_FILE name files that hold the database's password and the S3 store's.
"""

import ipaddress
import os
import secrets
import sys
import tempfile
from pathlib import Path

SHORTEST = 12  # characters of a password, which is MLflow's own rule
SECRETS = ("PGPASSWORD", "AWS_SECRET_ACCESS_KEY")  # read by libpq and by the S3 client


def main(argv: list[str]) -> None:
    for name in SECRETS:
        if file := os.environ.get(f"{name}_FILE"):
            os.environ[name] = Path(file).read_text(encoding="utf-8").strip()
    address, password = os.environ.get("MLFLOW_ADDRESS", "127.0.0.1"), os.environ.get("MLFLOW_PASSWORD", "")
    command = ["mlflow", "server", *argv]
    if password or not is_this_machine(address):
        if len(password) < SHORTEST:
            sys.exit(
                f"error: MLFLOW_ADDRESS={address}: other machines reach the server, and it asks them for a login. Set MLFLOW_PASSWORD to "
                f"{SHORTEST} characters or more (`openssl rand -hex 24`), or publish the server on 127.0.0.1."
            )
        os.environ |= prepare(os.environ["MLFLOW_BACKEND_STORE_URI"], os.environ.get("MLFLOW_USER") or "admin", password)
        command += ["--app-name", "basic-auth"]
    os.execvp(command[0], command)


def is_this_machine(address: str) -> bool:
    """Return whether only this machine reaches what is published on an address."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address == "localhost"


def prepare(store: str, user: str, password: str) -> dict[str, str]:
    """Write the settings of the login, whose users are in the runs' database; return the environment that leads to them.

    MLflow takes the first user's password at its first start alone: a later one is written here.
    """
    from mlflow.server.auth.sqlalchemy_store import SqlAlchemyStore

    users = SqlAlchemyStore()
    users.init_db(store)
    if users.has_user(user):
        users.update_user(user, password=password, is_admin=True)
    else:
        users.create_user(user, password, is_admin=True)
    users.engine.dispose()
    file = Path(tempfile.mkdtemp()) / "login.ini"  # a folder that nobody else reads
    uri = store.replace("%", "%%")
    file.write_text(f"[mlflow]\ndefault_permission = READ\ndatabase_uri = {uri}\nadmin_username = {user}\n", encoding="utf-8")
    return {
        "MLFLOW_AUTH_CONFIG_PATH": str(file),
        "MLFLOW_AUTH_ADMIN_USERNAME": user,
        "MLFLOW_AUTH_ADMIN_PASSWORD": password,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(32),  # the same in all workers
    }


if __name__ == "__main__":
    main(sys.argv[1:])
