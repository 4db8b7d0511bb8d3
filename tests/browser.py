"""What a person would see: an MLflow server, and pages of it in a real browser without a window."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
WHY_NOT = "no Chromium is installed (Debian: apt-get install chromium)"
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@contextmanager
def mlflow_ui(store: str, folder: Path) -> Iterator[str]:
    """The address of `mlflow ui` on a store, as soon as it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW")}
    env |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    command = [sys.executable, "-m", "mlflow", "ui", "--port", str(port), "--workers", "1", "--backend-store-uri", store]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        deadline = time.monotonic() + 180
        while True:
            try:
                with direct.open(f"{address}/health", timeout=5):
                    break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((folder / "server.log").read_text(encoding="utf-8")[-4000:]) from None
                time.sleep(0.2)
        yield address
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@contextmanager
def browser() -> Iterator[Any]:
    """Playwright's Browser, on the Chromium that is installed and with an empty profile."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS), timeout=180_000)
        try:
            yield running
        finally:
            running.close()


def new_page(running: Any, width: int = 1400, height: int = 900, scheme: str = "light") -> Any:
    """A page of a browser in which MLflow's assistant has been closed, which covers a third of a first page otherwise."""
    page = running.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.add_init_script("localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')")
    page.set_default_timeout(120_000)  # of waits: machines that test are busy
    return page


def keep(picture: Path) -> None:
    """Copy a screenshot to the folder LOSSFORGE_ARTIFACTS, where one is named."""
    if folder := os.environ.get("LOSSFORGE_ARTIFACTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, folder)
