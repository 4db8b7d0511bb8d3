"""Pictures for the README and the documentation: MLflow's pages of trainings and a sweep's comparison, in Chromium.

`uv run tools/photograph.py` trains two losses, two seeds of each, on the digits, and writes MLflow's pages of them to docs/pictures/: the
list of runs, a run, its curves, its model, and the comparison of all.

`uv run tools/photograph.py SWEEP [FOLDER]` with a sweep's name in the store `mlflow.db` of FOLDER (this repository's root unless told
otherwise) writes docs/pictures/sweep-comparison.png, docs/pictures/sweep-mlflow.png and results/comparison.csv.
"""

import contextlib
import io
import re
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from lab.runs.files import write_whole

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
WIDTH, HEIGHT = 1500, 850
COLORS = 128  # of a picture; more make its file larger and nothing clearer
WORDS = [
    "model=tiny_resnet",
    "data.image_size=16",
    "trainer.device=cpu",
    "loss.implementation=torch",
    "trainer.log_every=5",
    "optim.lr=0.003",
]
TRAINING = "workflowType=machine_learning"


def main(arguments: list[str]) -> int:
    if not arguments:
        return trainings()
    return comparison(arguments[0], Path(arguments[1] if len(arguments) > 1 else ROOT).resolve())


def trainings() -> int:
    """Train, compare, and photograph MLflow's pages."""
    from browser import browser, mlflow_ui
    from mlflow.tracking import MlflowClient

    import compare
    import train

    with tempfile.TemporaryDirectory() as place:
        store = f"sqlite:///{place}/mlflow.db"
        for loss in ("ce", "focal"):
            for seed in (0, 1):
                words = [f"loss={loss}", f"seed={seed}", f"name={loss}-seed{seed}", "tracking.register=digits"]
                sys.argv[:] = ["train.py", *WORDS, *words]  # what the run is to say of how it was started
                if status := train.main([*WORDS, *words, f"trainer.runs={place}/runs", f"tracking.uri={store}"]):
                    return status
        with mlflow_ui(store, Path(place)) as address, browser() as running:
            with contextlib.redirect_stdout(io.StringIO()) as said:
                if status := compare.main([f"tracking.uri={address}", f"runs={place}/comparisons"]):
                    return status
            client = MlflowClient(tracking_uri=address)
            experiment = client.get_experiment_by_name("lossforge").experiment_id
            (run,) = client.search_runs([experiment], "attributes.run_name = 'focal-seed1'")
            compared = re.search(r"http\S+viewStateShareKey=\S+", said.getvalue())
            assert compared is not None
            home = f"{address}/#/experiments/{experiment}"
            pages = {
                "mlflow-runs": (f"{home}/runs?viewStateShareKey=results&{TRAINING}", "focal-seed1"),
                "mlflow-run": (f"{home}/runs/{run.info.run_id}?{TRAINING}", "best_top1"),
                "mlflow-curves": (f"{home}/runs/{run.info.run_id}/model-metrics?{TRAINING}", "Add section"),
                "mlflow-model": (f"{home}/models/{run.outputs.model_outputs[0].model_id}?{TRAINING}", "best_top1"),
                "mlflow-comparison": (compared[0], "focal-seed1"),
            }
            PICTURES.mkdir(parents=True, exist_ok=True)
            for name, (page, text) in pages.items():
                photograph(running, page, text, PICTURES / f"{name}.png")
    return 0


def photograph(running: Any, address: str, text: str, path: Path) -> None:
    """Save a page, once it shows this text, with few colours."""
    from browser import new_page
    from PIL import Image

    page = new_page(running, WIDTH, HEIGHT)
    page.goto(address)
    page.get_by_text(text, exact=True).first.wait_for()
    page.wait_for_timeout(3000)  # charts are drawn one after another
    with Image.open(io.BytesIO(page.screenshot())) as picture:
        few = picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
        write_whole(path, partial(few.save, format="PNG", optimize=True))
    page.close()
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


def comparison(sweep: str, folder: Path) -> int:
    """A sweep's comparison: compare.py's own page, and MLflow's of the same runs."""
    from browser import browser, mlflow_ui, new_page

    import compare

    with (
        tempfile.TemporaryDirectory() as place,
        mlflow_ui(f"sqlite:///{folder / 'mlflow.db'}", Path(place)) as address,
        browser() as running,
    ):
        with contextlib.redirect_stdout(io.StringIO()) as said:
            if status := compare.main([f"sweep={sweep}", "baseline=loss=ce", f"tracking.uri={address}", f"runs={place}/runs"]):
                return status
        print(said.getvalue())
        (made,) = (Path(place) / "runs").iterdir()
        shutil.copy(made / "comparison.csv", ROOT / "results" / "comparison.csv")
        page = new_page(running, 1200)
        page.goto((made / "comparison.html").as_uri())
        end = page.get_by_role("heading", name="Runs", exact=True).bounding_box()  # below are addresses of this machine
        figures = {"x": 0, "y": 0, "width": 1200, "height": end["y"] - 10}
        page.screenshot(path=PICTURES / "sweep-comparison.png", full_page=True, clip=figures)
        compared = re.search(r"http\S+viewStateShareKey=\S+", said.getvalue())
        assert compared is not None
        photograph(running, compared[0], "Run Name", PICTURES / "sweep-mlflow.png")
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "experiments"), str(ROOT / "tests")]
    sys.exit(main(sys.argv[1:]))
