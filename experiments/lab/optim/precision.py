"""Mixed precision by the setting trainer.amp."""

import torch

AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, amp: str) -> torch.autocast:
    return torch.autocast(device.type, AMP.get(amp, torch.bfloat16), enabled=amp in AMP)
