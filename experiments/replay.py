"""Send to MLflow what it missed of earlier runs: `uv run experiments/replay.py runs/<run> ...`.

A sweep's folder stands for its own run and those in it. What has arrived already is not sent again. `tracking.uri=` and
`tracking.experiment=` choose the store, as for train.py.
"""

import sys
from pathlib import Path

from lab.errors import UserError
from lab.run_record import with_runs
from lab.settings import load


def main(words: list[str]) -> int:
    folders = [Path(word) for word in words if "=" not in word]
    try:
        tracking = load([word for word in words if "=" in word]).config.tracking
        if not folders or (lacking := [folder for folder in folders if not (folder / "metrics.jsonl").is_file()]):
            raise UserError(f"{lacking[0]}: holds no metrics.jsonl" if folders else "give one or more run folders, such as runs/*")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1

    from lab.tracking import Feeder, tracking_uri

    status = 0
    for folder in (run for given in folders for run in with_runs(given)):
        feeder = Feeder(folder, tracking_uri(tracking), tracking.experiment, tracking.patience_seconds)
        feeder.start()
        problem = feeder.close()
        print(f"{folder}: {problem or f'run {feeder.run_id} of {feeder.uri} is complete'}")
        status = status or int(problem is not None)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
