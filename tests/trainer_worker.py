"""Train as docs/use_with/hugging_face_trainer.md does in one of two processes, and compare with the model's own loss."""

import os
import tempfile
from pathlib import Path

import torch
from pages import run_python
from transformers.loss.loss_utils import LOSS_MAPPING

ACCUMULATION = "gradient_accumulation_steps=2"
OURS = "transformers.fuse(model)\n"
MAPPED = "from transformers.loss import loss_utils\nloss_utils.LOSS_MAPPING['ForCausalLM'] = transformers.loss_function\n"


def trained(changes: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return losses and gradient norms of the updates, and the parameters after them."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = run_python("docs/use_with/hugging_face_trainer.md", Path(folder), changes)["trainer"]
    assert trainer.args.world_size == int(os.environ["WORLD_SIZE"]) == 2
    records = [record for record in trainer.state.log_history if "loss" in record]
    found = {name: torch.tensor([record[name] for record in records]) for name in ("loss", "grad_norm")}
    return found | {name: p.detach() for name, p in trainer.accelerator.unwrap_model(trainer.model).named_parameters()}


for steps in ("1", "4"):
    changes = {ACCUMULATION: f"gradient_accumulation_steps={steps}, use_cpu={not torch.cuda.is_available()}"}
    ours, theirs = trained(changes), trained(changes | {OURS: ""})
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    kept = LOSS_MAPPING["ForCausalLM"]
    of_logits = trained(changes | {OURS: "model.loss_function = transformers.loss_function\n"})
    torch.testing.assert_close(of_logits, theirs, rtol=1e-4, atol=1e-5)
    mapped = trained(changes | {OURS: MAPPED})  # what the page warns of
    LOSS_MAPPING["ForCausalLM"] = kept
    assert mapped["loss"][0] < 0.995 * theirs["loss"][0]
if os.environ["RANK"] == "0":
    print("the objective is the model's own")
