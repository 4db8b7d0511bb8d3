"""Train two towers with open_clip's losses and with ours, in as many processes as torchrun starts, and compare every number."""

import itertools

import torch
import torch.distributed as dist
from open_clip.loss import ClipLoss, SigLipLoss
from torch import nn

from lossforge.integrations import open_clip as ours


class Towers(nn.Module):
    def __init__(self, bias):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(6, 8), nn.Linear(5, 8)
        self.logit_scale = nn.Parameter(torch.tensor(1.5))
        self.logit_bias = nn.Parameter(torch.tensor(-2.0)) if bias else None

    def forward(self, images, texts):
        features = nn.functional.normalize(self.image(images), dim=-1), nn.functional.normalize(self.text(texts), dim=-1)
        scale = {"logit_scale": self.logit_scale.exp()}
        return features, scale if self.logit_bias is None else {**scale, "logit_bias": self.logit_bias}


def trained(loss, accumulation, rank, processes):
    """Return the losses of two updates and the parameters after them. Micro-batches see the others' features, as in open_clip's loop."""
    model = Towers(isinstance(loss, SigLipLoss))
    if processes > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for update in range(2):
        draw = torch.Generator().manual_seed(10 * update + rank)
        batches = [(torch.randn(3, 6, generator=draw), torch.randn(3, 5, generator=draw)) for _ in range(accumulation)]
        with torch.no_grad():
            kept = [model(*batch)[0] for batch in batches]
        for micro, batch in enumerate(batches):
            features, options = model(*batch)
            both = [torch.cat([*(k[i] for k in kept[:micro]), features[i], *(k[i] for k in kept[micro + 1 :])]) for i in range(2)]
            value = loss(*both, **options)
            value.backward()
            losses.append(value.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), nn.utils.parameters_to_vector(model.parameters()).detach()


def main():
    dist.init_process_group("gloo")
    largest = ours.MATRIX
    rank, processes = dist.get_rank(), dist.get_world_size()
    of_processes = {"rank": rank, "world_size": processes}
    flags = itertools.product((False, True), (False, True))
    losses = {f"clip {local} {grad}": ClipLoss(local_loss=local, gather_with_grad=grad, **of_processes) for local, grad in flags}
    losses |= {f"siglip {how}": SigLipLoss(dist_impl=how, **of_processes) for how in ("bidir", "shift", "reduce", "gather")}
    for (name, loss), accumulation in itertools.product(losses.items(), (1, 4)):
        expected = trained(loss, accumulation, rank, processes)
        for matrix in (0, largest):
            ours.MATRIX = matrix
            with ours.patch():
                found = trained(loss, accumulation, rank, processes)
            assert matrix or not torch.equal(found[1], expected[1]), f"{name} ran open_clip's own code"
            of = (name, accumulation, matrix)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda m, of=of: f"{of}: {m}")
    dist.barrier()
    if rank == 0:
        print(f"{len(losses)} variants have open_clip's numbers", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
