"""Run SentenceTransformerTrainer with its loss of in-batch negatives and with ours, in as many processes as torchrun starts."""

import itertools
import tempfile

import torch
import torch.distributed as dist
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses
from sentence_transformers.models import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

from lossforge.integrations import sentence_transformers as ours

WORDS = [f"w{i}" for i in range(40)]


def model_of():
    torch.manual_seed(0)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["[UNK]", *WORDS])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=16)], device="cpu")


def data_of():
    draw = torch.Generator().manual_seed(0)
    texts = [" ".join(WORDS[i] for i in torch.randint(40, (5,), generator=draw)) for _ in range(3 * 48)]
    return Dataset.from_dict({"anchor": texts[:48], "positive": texts[48:96], "negative": texts[96:]})


def trained(options, accumulation):
    """Return loss and gradient norm of two updates, and the parameters after them."""
    model = model_of()
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            folder,
            max_steps=2,
            per_device_train_batch_size=3,
            gradient_accumulation_steps=accumulation,
            learning_rate=0.1,
            optim="sgd",
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            seed=0,
        )
        loss = losses.MultipleNegativesRankingLoss(model, **options)
        trainer = SentenceTransformerTrainer(model, arguments, train_dataset=data_of(), loss=loss)
        trainer.train()
    lines = [[line["loss"], line["grad_norm"]] for line in trainer.state.log_history if "grad_norm" in line]
    return torch.tensor(lines), torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def main():
    dist.init_process_group("gloo")
    symmetric = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    for options, accumulation in itertools.product(
        ({}, {"gather_across_devices": True}, {**symmetric, "gather_across_devices": True}), (1, 4)
    ):
        expected = trained(options, accumulation)
        with ours.patch():
            found = trained(options, accumulation)
        assert len(found[0]) == 2
        assert not torch.equal(found[1], expected[1])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=lambda m, of=(options, accumulation): f"{of}: {m}")
    if dist.get_rank() == 0:
        print("every number is the library's", flush=True)


if __name__ == "__main__":
    main()
