"""Run transformers' Trainer with a model's own loss and with ours, in as many processes as torchrun starts, and compare every log line."""

import tempfile

import torch
import torch.distributed
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset

from lossforge.integrations import transformers as ours

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = {"vocab_size": 101, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.1}
MODELS = {
    "Llama": {},
    "Gemma2": {"head_dim": 8, "final_logit_softcapping": 3.0},
    "Mixtral": {"num_local_experts": 4, **EXPERTS},
}


class Uneven(Dataset):
    """Rows of 4 to 24 tokens, of which the first few have no label: batches and processes differ in how many labels count."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(4, 25, (), generator=generator))
        tokens = torch.randint(3, 101, (24,), generator=generator)
        labels = tokens.clone()
        labels[length:] = -100
        labels[: int(torch.randint(0, length, (), generator=generator))] = -100
        return {"input_ids": tokens, "labels": labels, "attention_mask": (torch.arange(24) < length).long()}


def model_of(name):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **TOKENS, **MODELS[name])
    return getattr(transformers, f"{name}ForCausalLM")(config)


def history_of(model, accumulation, **given):
    """Return loss and gradient norm of four updates, and the parameters after them."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=accumulation,
            learning_rate=1e-3,
            optim="sgd",
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
            **given,
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=Uneven())
        trainer.train()
    lines = [[line["loss"], line["grad_norm"]] for line in trainer.state.log_history if "grad_norm" in line]
    return torch.tensor(lines), nn.utils.parameters_to_vector(model.parameters()).detach()


def own_batch():
    """Return four rows of this process's own."""
    rows = [Uneven()[torch.distributed.get_rank() * 4 + i] for i in range(4)]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def sharded_gradients(model):
    """Return loss and whole gradients of a model under FSDP2, with a batch of its own on each process; the names and shapes of its
    collectives, in their order; and whether there were logits."""
    for part in (*model.model.layers, model.lm_head):
        fully_shard(part)
    fully_shard(model)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        output = model(**own_batch())
        output.loss.backward()
    exchanges = [(event.name, event.input_shapes) for event in seen.events() if event.name.startswith("c10d::")]
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return (output.loss.detach(), gradients), exchanges, output.logits is not None


def check_fsdp2(name):
    theirs, expected, _ = sharded_gradients(model_of(name))
    model = model_of(name)
    ours.fuse(model)
    found, exchanges, logits = sharded_gradients(model)
    torch.testing.assert_close(found, theirs, rtol=2e-4, atol=2e-6, msg=lambda m: f"{name} under FSDP2: {m}")
    assert not logits, f"{name} under FSDP2 computed logits"
    assert exchanges == expected, f"{name} under FSDP2 exchanged other tensors"
    assert expected, "no collective was seen"


def check_tensor_parallel():
    """Check that a head whose classes lie on both processes keeps the model's own loss."""
    results = []
    for parallel in (False, True):
        model = model_of("Llama")
        if parallel:
            ours.fuse(model)
            mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
            parallelize_module(model.lm_head, mesh, ColwiseParallel(output_layouts=Replicate()))
        output = model(**{name: t[None] for name, t in Uneven()[0].items()})
        results.append((output.logits.detach(), output.loss.detach()))
    torch.testing.assert_close(results[1], results[0], rtol=2e-4, atol=2e-6)


def main():
    torch.distributed.init_process_group("gloo")
    if torch.distributed.get_world_size() > 1:
        for name in MODELS:
            check_fsdp2(name)
        check_tensor_parallel()
    for name in MODELS:
        for accumulation in (1, 4):
            theirs = history_of(model_of(name), accumulation)
            fused = model_of(name)
            ours.fuse(fused)
            of_logits = model_of(name)
            of_logits.loss_function = ours.loss_function
            for what, model in {"fused": fused, "loss_function": of_logits}.items():
                found = history_of(model, accumulation)
                assert len(found[0]) == 4
                torch.testing.assert_close(found, theirs, rtol=2e-4, atol=2e-6, msg=lambda m, of=(name, accumulation, what): f"{of}: {m}")
    print("every number is that of the model's own loss", flush=True)


if __name__ == "__main__":
    main()
