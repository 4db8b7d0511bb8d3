"""The tables of a new SQLite store, which MLflow makes by dozens of migrations: 0.7 s of a short run."""

import contextlib
import functools
import sqlite3
import tempfile
from typing import Any


def copy_tables() -> None:
    """Let MLflow make them once in this process and its forks. Each further new store gets a copy."""
    import sqlalchemy
    from mlflow.store.db import utils

    make, made = utils._initialize_tables, list[sqlite3.Connection]()
    if make.__module__ == __name__:
        return

    @functools.wraps(make, assigned=())
    def initialize(engine: Any) -> None:
        if engine.dialect.name != "sqlite" or sqlalchemy.inspect(engine).get_table_names():
            make(engine)
            return
        if not made:
            make(engine)
        with contextlib.closing(engine.raw_connection()) as connection:
            store = connection.driver_connection
            if made:
                made[0].backup(store)
            else:
                tables = sqlite3.connect(":memory:", check_same_thread=False)
                store.backup(tables)
                made.append(tables)

    utils._initialize_tables = initialize


def make_tables() -> None:
    """Make them now: the forks of this process then only copy them."""
    import sqlalchemy
    from mlflow.store.db import utils

    copy_tables()
    with tempfile.TemporaryDirectory() as folder:
        engine = sqlalchemy.create_engine(f"sqlite:///{folder}/mlflow.db")
        utils._initialize_tables(engine)
        engine.dispose()
