"""Train a small model under FSDP2 with torchtitan's chunked loss and with ours, in as many processes as torchrun starts, and compare."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.models.common.linear import Linear

from lossforge.integrations import torchtitan as ours

CLASSES = 53


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    labels = torch.randint(CLASSES, (2, 8), generator=generator)
    labels[0, : 1 + (3 * step + 5 * rank) % 8] = -100
    return torch.randn(2, 8, 8, generator=generator), labels


def trained(config, accumulation, policy):
    """Return the losses of all processes, and the parameters after two updates."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.Linear(8, 16), "head": Linear(Linear.Config(in_features=16, out_features=CLASSES))})
    for part in model.values():
        fully_shard(part, mp_policy=policy)
    loss = config.build()
    loss.set_lm_head(model["head"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for update in range(2):
        batches = [batch(update * accumulation + i, dist.get_rank()) for i in range(accumulation)]
        tokens = torch.stack([(labels != -100).sum() for _, labels in batches]).sum().float()
        dist.all_reduce(tokens)
        for x, labels in batches:
            value, _ = loss(model["body"](x), labels, tokens)
            value.backward()
            losses.append(value.detach().float())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), [p.full_tensor().detach() for p in model.parameters()]


def main():
    dist.init_process_group("gloo")
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for policy, close in ((MixedPrecisionPolicy(), {"rtol": 1e-5, "atol": 1e-6}), (mixed, {"rtol": 2e-2, "atol": 2e-3})):
        for accumulation in (1, 4):
            expected = trained(ChunkedLossWrapper.Config(num_chunks=4), accumulation, policy)
            torch.testing.assert_close(trained(ours.Loss.Config(), accumulation, policy), expected, **close)
    print("every update is torchtitan's own", flush=True)


if __name__ == "__main__":
    main()
