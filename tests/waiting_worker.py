"""One of two processes: the second fails, while the first waits in C++, where no signal's handler runs, as a rank waits for its GPU."""

import os
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "experiments"))

import torch

from lab.base.errors import RankError
from lab.base.process import Stop
from lab.processes import rank_failures


def end(error: RankError) -> None:
    Path(sys.argv[1]).write_text(str(error))


Stop(checkpoint_first=True, quiet=True)
torch.distributed.init_process_group("gloo")
store = torch.distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
try:
    with rank_failures.watched(end):
        if torch.distributed.get_rank() == 1:
            raise ValueError("the second one's fault")
        store.wait(["what never comes"], timedelta(seconds=300))
except RankError:
    sys.exit(1)
