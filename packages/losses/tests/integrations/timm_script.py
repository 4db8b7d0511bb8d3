"""A training script of timm's parts, which knows nothing of us. It prints losses and gradient norms of every update as JSON."""

import itertools
import json
import os

import numpy as np
import torch
import torch.nn as nn
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2

rank, processes = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if processes > 1:
    torch.distributed.init_process_group("gloo")

logged = []
criteria = LabelSmoothingCrossEntropy(0.1), SoftTargetCrossEntropy(), BinaryCrossEntropy(target_threshold=0.2, sum_classes=True)
for criterion, accumulation in itertools.product(criteria, (1, 4)):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 5))
    if processes > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, momentum=0.9)
    mixup = Mixup(mixup_alpha=0.8, label_smoothing=0.1, num_classes=5)
    for update in range(2):
        total = 0.0
        for micro in range(accumulation):
            torch.manual_seed(100 * update + 10 * micro + rank)
            np.random.seed(micro)  # timm's Mixup draws with numpy
            images, target = torch.randn(4, 3, 16, 16), torch.randint(5, (4,))
            if not isinstance(criterion, LabelSmoothingCrossEntropy):
                images, target = mixup(images, target)
            loss = criterion(model(images), target) / accumulation
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        if processes > 1:
            torch.distributed.all_reduce(total)
        logged.append([float(total), float(norm)])
if rank == 0:
    print(json.dumps(logged), flush=True)
if processes > 1:
    torch.distributed.destroy_process_group()
    os._exit(0)  # the model holds the group: a thread of gloo's that lets go of a tensor while Python ends aborts the process
