"""Pictures of a sweep's comparison for the README: compare.py's own page, and MLflow's comparison of the same runs, in Chromium.

`uv run tools/photograph_comparison.py SWEEP [FOLDER]` with a sweep's name in the store `mlflow.db` of FOLDER (this repository's root
unless told otherwise) writes results/comparison.png, results/mlflow-comparison.png and results/comparison.csv.
"""

import contextlib
import io
import re
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 1200


def main(arguments: list[str]) -> int:
    from browser import browser, mlflow_ui

    import compare

    sweep, folder = arguments[0], Path(arguments[1] if len(arguments) > 1 else ROOT).resolve()
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
        page = running.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light")
        page.set_default_timeout(120_000)
        page.goto((made / "comparison.html").as_uri())
        end = page.get_by_role("heading", name="Runs", exact=True).bounding_box()  # below are addresses of this machine
        figures = {"x": 0, "y": 0, "width": WIDTH, "height": end["y"] - 10}
        page.screenshot(path=ROOT / "results" / "comparison.png", full_page=True, clip=figures)
        address_of_runs = re.search(r"http\S+/#/compare-runs\?\S+", said.getvalue())
        assert address_of_runs is not None
        page.set_viewport_size({"width": 1900, "height": 1100})
        page.goto(address_of_runs[0])
        page.get_by_text("best/top1", exact=True).first.wait_for()
        page.screenshot(path=ROOT / "results" / "mlflow-comparison.png", clip={"x": 0, "y": 0, "width": 1410, "height": 1100})
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "experiments"), str(ROOT / "tests")]
    sys.exit(main(sys.argv[1:]))
