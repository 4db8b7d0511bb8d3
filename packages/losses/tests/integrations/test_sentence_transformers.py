"""sentence-transformers' loss of in-batch negatives, patched, against its own; and its trainer, on one process and on two."""

import compared
import processes
import pytest
import torch

pytest.importorskip("sentence_transformers")

from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.util import cos_sim, dot_score, euclidean_sim

from lossforge.integrations import sentence_transformers as ours

SYMMETRIC = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}


def compare(options, count=3, exact=False):
    draw = torch.Generator().manual_seed(0)
    embeddings = [torch.randn(5, 8, generator=draw).requires_grad_() for _ in range(count)]
    loss = MultipleNegativesRankingLoss(None, **options)
    compared.compare(ours.patch, lambda: loss.compute_loss_from_embeddings(embeddings, None), embeddings, exact)


@pytest.mark.parametrize("similarity", [cos_sim, dot_score])
@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("directions", [{}, SYMMETRIC], ids=["one way", "symmetric"])
def test_in_batch_negatives(directions, count, similarity):
    compare({"similarity_fct": similarity, "scale": 5.0, **directions}, count)


@pytest.mark.parametrize(
    "options",
    [
        {"similarity_fct": euclidean_sim},
        {"directions": ("query_to_doc", "doc_to_query")},
        {"directions": ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")},
        {"hardness_mode": "hard_negatives", "hardness_strength": 5.0},
    ],
    ids=["another similarity", "two directions", "four directions", "hardness"],  # no address of a function: each process finds the same
)
def test_what_ours_lacks_is_left_to_the_library(options):
    compare(options, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_the_trainer(count, tmp_path):
    """With one micro-batch an update and with four, embeddings gathered or not."""
    assert "every number is the library's" in processes.run("sentence_transformers_runs.py", processes=count, folder=tmp_path)
