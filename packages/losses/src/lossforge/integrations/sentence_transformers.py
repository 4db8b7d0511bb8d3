"""sentence-transformers: its loss of in-batch negatives, without a matrix of similarities.

    from lossforge.integrations import sentence_transformers

    sentence_transformers.patch()                       # then MultipleNegativesRankingLoss as before

Tested with sentence-transformers 6.2.
"""

from typing import Any

import torch
from torch import Tensor

from lossforge.losses import info_nce_loss
from lossforge.patch.patching import Patch, Replacement, or_theirs
from lossforge.patch.patching import patch as patch_names

TESTED = "6.2"
SYMMETRIC = {"query_to_doc", "doc_to_query"}


def _ranking(self: Any, embeddings: list[Tensor], labels: Any) -> Tensor | str:
    from sentence_transformers import util

    normalize = self.similarity_fct is util.cos_sim
    if not normalize and self.similarity_fct is not util.dot_score:
        return "ours has the similarities cos_sim and dot_score"
    directions = set(self.directions)
    if directions != {"query_to_doc"} and (directions != SYMMETRIC or self.partition_mode != "per_direction"):
        return f"ours has no joint softmax of the directions {', '.join(self.directions)}"
    if self.hardness_mode is not None and self.hardness_strength > 0:
        return "ours has no weight of hard negatives"
    if len(embeddings) < 2 or any(each.ndim != 2 or each.is_sparse for each in embeddings):
        return "the embeddings are not two or more dense matrices"
    query, *documents = embeddings
    queries, first = query, 0
    if self.gather_across_devices:
        queries = util.all_gather_with_grad(query)
        documents = [util.all_gather_with_grad(each) for each in documents]
        first = util.get_rank() * len(query)
    own = slice(first, first + len(query))
    options: dict[str, Any] = {"temperature": 1 / self.scale, "normalize": normalize, "offset": first}
    loss = info_nce_loss(queries[own], torch.cat(documents), **options)
    if directions == SYMMETRIC:
        loss = (loss + info_nce_loss(documents[0][own], queries, **options)) / 2
    return loss


def patch(force: bool = False) -> Patch:
    """Replace the loss of in-batch negatives by ours.

    Args:
        force: go on where sentence-transformers is not as it was tested.

    Returns:
        a handle: a context manager with `undo()`.

    Raises:
        ModuleNotFoundError: sentence-transformers is not installed.
        IntegrationError: its names or parameters are not those that were tested. Nothing was replaced.
    """
    module = "sentence_transformers.sentence_transformer.losses.multiple_negatives_ranking"
    name = f"{module}:MultipleNegativesRankingLoss.compute_loss_from_embeddings"
    made = Replacement(name, or_theirs("sentence-transformers", _ranking), "(self, embeddings, labels)")
    return patch_names("sentence-transformers", TESTED, [made], force=force)
