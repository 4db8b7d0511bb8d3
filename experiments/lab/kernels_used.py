"""Which code computed the loss, and how many kernels it launched."""

import torch

from lab.loss_schema import LossConfig


class KernelsUsed:
    def __init__(self, config: LossConfig, device: torch.device) -> None:
        self.lossforge = config.implementation == "lossforge" and config.kernels
        self.backend = "torch's own loss" if config.kernels else "plain torch"
        if self.lossforge:
            from lossforge.losses import backend

            self.backend = backend(torch.zeros(1, device=device))
        self.before = self._launches()

    def counts(self) -> dict[str, float]:
        """Launches since the start, in all and by kernel."""
        now = self._launches()
        launches = {name: count - self.before.get(name, 0) for name, count in now.items() if count > self.before.get(name, 0)}
        by_kernel = {f"loss/launches_{name}": float(count) for name, count in launches.items()}
        return {"loss/launches": float(sum(launches.values())), **by_kernel}

    def tags(self) -> dict[str, str]:
        return {"loss.backend": self.backend}

    def summary(self) -> str:
        launches = self.counts()["loss/launches"]
        return f"{self.backend}, {launches:.0f} kernel launches" if launches else self.backend

    def _launches(self) -> dict[str, int]:
        if not self.lossforge:
            return {}
        from lossforge.kernels import launch_counts

        return launch_counts()
