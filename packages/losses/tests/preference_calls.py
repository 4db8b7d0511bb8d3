"""What tests of preference objectives share: log-probabilities, as batches of each kind, and a call's value and gradients."""

import torch

from lossforge import losses as L


def logps(*shape, seed=0, low=-6.0):
    g = torch.Generator().manual_seed(seed)
    return torch.rand(*shape, generator=g, dtype=torch.float64) * (low + 0.05) - 0.05


def pairs(n=5, count=2):
    return [logps(n, seed=i) for i in range(count)]


def tokens(n=4, t=6, count=3):
    """Policy, old and reference so far apart that ratios are clipped on both sides, and a mask with one empty completion."""
    policy = logps(n, t, seed=1)
    return [policy, *(policy + (logps(n, t, seed=2 + i, low=-1.2) + 0.6) for i in range(count - 1))]


def none(*shape):
    """Return zeros that take a gradient."""
    return torch.zeros(*shape, requires_grad=True)


def value_and_gradients(function, *values, **kwargs):
    given = [torch.tensor(v, requires_grad=True) for v in values]
    out = function(*given, reduction="none", **kwargs)
    return out.tolist(), [g.tolist() for g in torch.autograd.grad(out.sum(), given)]


A = torch.tensor([1.3, -0.7, 0.4, -2.0], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 0, 1, 1, 1], [0] * 6, [1] * 6])
KTO = [logps(4, seed=0), logps(3, seed=1), logps(2, seed=3), logps(4, seed=4), logps(3, seed=5), logps(2, seed=6) - 1.0]
POLICY, OLD, REF = tokens()


RECORDS = [
    ("loss_type", L.DrGRPO, {"max_completion_length": "max_completion_length"}),
    ("loss_type", L.Sapo, {"sapo_temperature_pos": "temperature_pos", "sapo_temperature_neg": "temperature_neg"}),
    ("loss_type", L.Vespo, {f"vespo_{name}": name for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")}),
    ("loss_type", L.ClipCov, {"clip_cov_ratio": "ratio", "clip_cov_lb": "lower", "clip_cov_ub": "upper"}),
    ("loss_type", L.KLCov, {"kl_cov_ratio": "ratio", "ppo_kl_coef": "coef"}),
    ("loss_type", L.DiscoPOP, {"discopop_tau": "tau"}),
    ("loss_type", L.TpoL, {"tpo_l_gamma": "gamma"}),
    ("f_divergence_type", L.AlphaDivergence, {"f_alpha_divergence_coef": "alpha"}),
]
"""For each record of numbers the argument that takes it, and its numbers by the names that TRL and verl have."""
OF_KL = {
    "kl_clamp": "clamp",
    "use_bias_correction_kl": "bias_correction",
    "kl_type": "estimator",
    "kl_output_clamp_value": "clamp_estimate",
}


def in_records(options):
    """Return options by the names of TRL and verl as our functions take them: in records."""
    left = dict(options)

    def taken(names):
        return {ours: left.pop(theirs) for theirs, ours in names.items() if theirs in left}

    for argument, record, names in RECORDS:
        if own := taken(names):
            left[argument] = record(**own)
    if how := taken(OF_KL):
        left["beta"] = L.KLPenalty(left.get("beta", 0.0), **how)
    return left
