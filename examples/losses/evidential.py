"""Evidential classification: a Dirichlet distribution over class probabilities. Its digamma needs the whole row, so a plain function."""

import torch
import torch.nn.functional as F
from torch import Tensor


def evidential_loss(input: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
    """Return ψ(S) - ψ(αₜ) + λ KL(Dir(α̃) ‖ Dir(1)), α = 1 + softplus(x), S = Σ α, α̃ = α with 1 at the class t (arXiv 1806.01768, eq. 4).

    input: (N, C). target: (N,). weight: λ, in the paper min(1, epoch / 10).
    """
    alpha = 1 + F.softplus(input)
    risk = alpha.sum(1).digamma() - alpha.gather(1, target[:, None]).squeeze(1).digamma()
    wrong = torch.where(F.one_hot(target, input.shape[1]).bool(), 1.0, alpha)
    total, classes = wrong.sum(1), torch.full((), input.shape[1], dtype=input.dtype, device=input.device)
    divergence = total.lgamma() - classes.lgamma() - wrong.lgamma().sum(1)
    divergence = divergence + ((wrong - 1) * (wrong.digamma() - total.digamma()[:, None])).sum(1)
    return (risk + weight * divergence).mean()
