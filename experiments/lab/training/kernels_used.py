"""Report which code computed the loss, and how many kernels it launched."""

from collections import Counter

import torch

from lab.config.loss_schema import LossConfig
from lab.tasks.losses import has_kernels


class KernelsUsed:
    def __init__(self, config: LossConfig, device: torch.device) -> None:
        self.lossforge = config.implementation == "lossforge" and has_kernels(config)
        self.backend = "torch's own loss" if has_kernels(config) else "plain torch, without kernels"
        if self.lossforge:
            from lossforge.losses import backend

            self.backend = backend(torch.zeros(1, device=device))
        self.before = self._launches()

    def state(self) -> dict[str, int]:
        """Return the launches of each kernel since the run's start."""
        return dict(self._launches() - self.before)

    def load_state(self, state: dict[str, int]) -> None:
        """Continue counting from the launches of the run's earlier processes."""
        self.before = self._launches()
        self.before.subtract(state)

    def counts(self) -> dict[str, float]:
        """Return the launches since the run's start, in total and by kernel."""
        launches = self.state()
        by_kernel = {f"loss_launches_{name}": float(count) for name, count in launches.items()}
        return {"loss_launches": float(sum(launches.values())), **by_kernel}

    def tags(self) -> dict[str, str]:
        return {"loss.backend": self.backend}

    def summary(self) -> str:
        launches = self.counts()["loss_launches"]
        return f"{self.backend}, {launches:.0f} kernel launches" if launches else self.backend

    def _launches(self) -> Counter[str]:
        if not self.lossforge:
            return Counter()
        from lossforge.kernels import launch_counts

        return Counter(launch_counts())
