"""Pictures for the README and the documentation: MLflow's pages of trainings and a sweep's comparison, in Chromium.

`uv run tools/photograph.py` trains a sweep of two losses, two seeds of each, on the digits, and writes MLflow's pages of it to
docs/pictures/: the list of runs, a run, its curves, its model, and the comparison of all.

`uv run tools/photograph.py SWEEP [FOLDER]` with a sweep's name in the store `mlflow.db` of FOLDER (this repository's root unless told
otherwise) writes docs/pictures/sweep-comparison.png, docs/pictures/sweep-mlflow.png and results/comparison.csv.
"""

import contextlib
import io
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lab
from lab.base.paths import sqlite_uri

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
WIDTH, HEIGHT = 1500, 850
COLORS = 128  # of a picture; more make its file larger and nothing clearer
TINY = "model=tiny_resnet data.image_size=16 trainer.device=cpu loss.implementation=torch trainer.log_every=5 optim.lr=0.003"
TRAINING = "workflowType=machine_learning"


def trainings() -> None:
    """Train, compare, and photograph MLflow's pages."""
    from mlflow.tracking import MlflowClient

    import train

    with tempfile.TemporaryDirectory() as place:
        store = sqlite_uri(Path(place, "mlflow.db"))
        words = ["-m", *TINY.split(), "loss=ce,focal", "seed=0,1", "tracking.register=digits"]
        sys.argv[:] = ["train.py", *words]  # the sweep records this as its command
        if status := train.main([*words, f"trainer.runs={place}/runs", f"tracking.uri={store}"]):
            sys.exit(status)
        with shown(store) as (address, running):
            _, comparison = compared(f"tracking.uri={address}", f"runs={place}/comparisons")
            client = MlflowClient(tracking_uri=address)
            experiment = client.get_experiment_by_name("lossforge").experiment_id
            (run,) = client.search_runs([experiment], "attributes.run_name = 'focal-seed1'")
            home = f"{address}/#/experiments/{experiment}"
            model = run.outputs.model_outputs[0].model_id
            photograph(running, "mlflow-runs", f"{home}/runs?viewStateShareKey=results&{TRAINING}", "focal-seed1")
            photograph(running, "mlflow-run", f"{home}/runs/{run.info.run_id}?{TRAINING}", "best_top1")
            photograph(running, "mlflow-curves", f"{home}/runs/{run.info.run_id}/model-metrics?{TRAINING}", "Add section")
            photograph(running, "mlflow-model", f"{home}/models/{model}?{TRAINING}", "best_top1")
            photograph(running, "mlflow-comparison", comparison, "focal-seed1")


def sweep(name: str, folder: Path) -> None:
    """Photograph a sweep's comparison: compare.py's page, and MLflow's of the same runs."""
    from browser import new_page

    with tempfile.TemporaryDirectory() as place, shown(sqlite_uri(folder / "mlflow.db")) as (address, running):
        made, comparison = compared(f"sweep={name}", "baseline=loss=ce", f"tracking.uri={address}", f"runs={place}/runs")
        shutil.copy(made / "comparison.csv", ROOT / "results" / "comparison.csv")
        page = new_page(running, 1200)
        page.goto((made / "comparison.html").as_uri())
        end = page.get_by_role("heading", name="Runs", exact=True).bounding_box()  # below are addresses of this machine
        figures = {"x": 0, "y": 0, "width": 1200, "height": end["y"] - 10}
        page.screenshot(path=PICTURES / "sweep-comparison.png", full_page=True, clip=figures)
        photograph(running, "sweep-mlflow", comparison, "Run Name")


@contextlib.contextmanager
def shown(store: str) -> Iterator[tuple[str, Any]]:
    """Start MLflow's server on a store, and a browser; yield the server's address and the browser."""
    from browser import browser, mlflow_ui

    with tempfile.TemporaryDirectory() as logs, mlflow_ui(store, Path(logs)) as address, browser() as running:
        yield address, running


def compared(*words: str) -> tuple[Path, str]:
    """Compare runs; return the comparison's folder, and its address in MLflow, which is in what compare.py prints."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        found = lab.compare(*words)
    print(said.getvalue())
    return found.folder, re.findall(r"http\S+viewStateShareKey=\S+", said.getvalue())[0]


def photograph(running: Any, name: str, address: str, text: str) -> None:
    """Save a page with few colours, once it shows this text."""
    from browser import new_page
    from PIL import Image

    page, path = new_page(running, WIDTH, HEIGHT), PICTURES / f"{name}.png"
    page.goto(address)
    page.get_by_text(text, exact=True).first.wait_for()
    page.wait_for_timeout(3000)  # charts are drawn one after another
    with Image.open(io.BytesIO(page.screenshot())) as picture:
        picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
    page.close()
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "experiments"), str(ROOT / "tests")]
    if sys.argv[1:]:
        sweep(sys.argv[1], Path(sys.argv[2] if sys.argv[2:] else ROOT).resolve())
    else:
        trainings()
