"""Start compose.yaml's MLflow server: where it listens beyond this machine, it asks for a login.

usage: python3 serve_mlflow.py [option of `mlflow server` ...]

MLFLOW_ADDRESS is the address that its port is published on. Beyond this machine, or where there is an MLFLOW_PASSWORD, MLflow's own
basic-auth app runs, with MLFLOW_USER as the one who may do everything, and MLFLOW_TRAIN_USER for what trains, who may write to every
experiment and registered model, and manage no user; both passwords are written anew at each start.
PGPASSWORD_FILE and AWS_SECRET_ACCESS_KEY_FILE name files that hold the database's password and the S3 store's.
"""

import ipaddress
import os
import secrets
import sys
import tempfile
from pathlib import Path

SHORTEST = 12  # characters of a password, which is MLflow's own rule
USERS = {"MLFLOW_USER": "admin", "MLFLOW_TRAIN_USER": "train"}  # with their defaults
PASSWORDS = ("MLFLOW_PASSWORD", "MLFLOW_TRAIN_PASSWORD")
SECRETS = ("PGPASSWORD", "AWS_SECRET_ACCESS_KEY")  # read by libpq and by the S3 client


def main(argv: list[str]) -> None:
    for name in SECRETS:
        if file := os.environ.get(f"{name}_FILE"):
            os.environ[name] = Path(file).read_text(encoding="utf-8").strip()
    address, passwords = os.environ.get("MLFLOW_ADDRESS", "127.0.0.1"), [os.environ.get(name, "") for name in PASSWORDS]
    command = ["mlflow", "server", *argv]
    if any(passwords) or not is_this_machine(address):
        users = [os.environ.get(name) or default for name, default in USERS.items()]
        if min(map(len, passwords)) < SHORTEST or len({*users}) < 2 or len({*passwords}) < 2:
            sys.exit(
                f"error: MLFLOW_ADDRESS={address}: where other machines reach the server, or there is a password, it asks for a login. Set "
                f"{' and '.join(PASSWORDS)} to two passwords of {SHORTEST} characters or more (`openssl rand -hex 24`), for two users "
                f"({' and '.join(USERS)}, now {' and '.join(users)}); or publish the server on 127.0.0.1 without passwords."
            )
        os.environ |= prepare(os.environ["MLFLOW_BACKEND_STORE_URI"], *zip(users, passwords, strict=True))
        command += ["--app-name", "basic-auth"]
    os.execvp(command[0], command)


def is_this_machine(address: str) -> bool:
    """Return whether only this machine reaches what is published on an address."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address == "localhost"


def prepare(store: str, admin: tuple[str, str], train: tuple[str, str]) -> dict[str, str]:
    """Write the settings of the login, whose users are in the runs' database; return the environment that leads to them.

    MLflow takes the first user's password at its first start alone: a later one is written here.

    Args:
        store: the address of the runs' database.
        admin: name and password of the user who may do everything.
        train: those of the user of what trains.
    """
    from mlflow.server.auth.sqlalchemy_store import SqlAlchemyStore

    users = SqlAlchemyStore()
    users.init_db(store)
    for name, password in (admin, train):
        if users.has_user(name):
            users.update_user(name, password=password, is_admin=name == admin[0])
        else:
            users.create_user(name, password, is_admin=name == admin[0])
    for kind in ("experiment", "registered_model"):
        users.grant_user_permission(train[0], kind, "*", "EDIT")
    users.engine.dispose()
    file = Path(tempfile.mkdtemp()) / "login.ini"  # a folder that nobody else reads
    uri = store.replace("%", "%%")
    file.write_text(f"[mlflow]\ndefault_permission = READ\ndatabase_uri = {uri}\nadmin_username = {admin[0]}\n", encoding="utf-8")
    return {
        "MLFLOW_AUTH_CONFIG_PATH": str(file),
        "MLFLOW_AUTH_ADMIN_USERNAME": admin[0],
        "MLFLOW_AUTH_ADMIN_PASSWORD": admin[1],
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_hex(32),  # the same in all workers
    }


if __name__ == "__main__":
    main(sys.argv[1:])
