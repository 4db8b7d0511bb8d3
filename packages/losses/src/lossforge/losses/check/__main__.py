"""python -m lossforge.losses.check module:my_loss"""

import argparse
import difflib
import functools
import os
import sys
import warnings

import torch


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lossforge.losses.check", description="Check a loss against float64 and in PyTorch; status 1 where a check fails."
    )
    parser.add_argument("loss", help="module:name or path/to/file.py:name of a loss of your own, or a name of the registry")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="by default cuda where there is a GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="the formula, a few calls in float32, the edges: seconds instead of minutes")
    given = parser.parse_args()
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":  # chosen before anything imports triton
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        os.execve(sys.executable, [sys.executable, "-m", __package__, *sys.argv[1:]], environment)
    from lossforge import kernels, losses
    from lossforge.losses.check import check
    from lossforge.losses.custom.find import find
    from lossforge.losses.registry import LOSSES

    if given.loss not in LOSSES and given.loss in losses.__all__:
        entries = [name for name, entry in LOSSES.items() if entry.function.__name__ == given.loss]
        meant = f": did you mean {entries[0]}?" if entries else f", which has no such name. In the registry: {', '.join(LOSSES)}."
        print(f"{given.loss}: check takes names of the registry{meant}", file=sys.stderr)
        return 2
    try:
        kernels.load("math")
        loss = LOSSES[given.loss] if given.loss in LOSSES else find(given.loss)
    except (ImportError, FileNotFoundError, TypeError, ValueError) as problem:
        near = difflib.get_close_matches(given.loss, LOSSES, 1)
        own = ":" in given.loss or given.loss.endswith(".py")
        known = "" if own else f" Did you mean {near[0]}?" if near else f" In the registry: {', '.join(LOSSES)}."
        print(f"{given.loss}: {problem}.{known}", file=sys.stderr)
        return 2
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\..*interpreter")  # numpy's, of infinities on purpose
        report = check(loss, device=given.device, seed=given.seed, quick=given.quick, show=functools.partial(print, flush=True))
    print(f"\n{report.counts}")
    return 0 if report else 1


if __name__ == "__main__":
    sys.exit(main())
