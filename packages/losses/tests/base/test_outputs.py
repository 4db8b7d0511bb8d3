"""Results beside the loss: those that were asked for, in a stated order, as a named tuple everywhere."""

import copy
import pickle

import pytest
import torch

from lossforge import losses as L

LOGITS, INDEX = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 5, 2, 2])
INPUT, HEAD = LOGITS[:, :3], LOGITS.T[:, :3].contiguous()
FAMILIES = [
    (L.CrossEntropyOutput, lambda **o: L.cross_entropy(LOGITS, INDEX, **o)),
    (L.CrossEntropyOutput, lambda **o: L.cross_entropy(LOGITS, INDEX, token_weight="entropy", **o)),
    (L.CrossEntropyOutput, lambda **o: L.CrossEntropyLoss(**o)(LOGITS, INDEX)),
    (L.CrossEntropyOutput, lambda **o: L.linear_cross_entropy(INPUT, HEAD, INDEX, skip_ignored=True, **o)),
    (L.CrossEntropyOutput, lambda **o: L.LinearCrossEntropyLoss(**o)(INPUT, HEAD, INDEX)),
    (L.TokenLogps, lambda **o: L.selective_log_softmax(LOGITS, INDEX, **o)),
    (L.TokenLogps, lambda **o: L.selective_log_softmax(LOGITS, INDEX.unsqueeze(1).expand(4, 2), **o)),
    (L.TokenLogps, lambda **o: L.linear_selective_log_softmax(INPUT, HEAD, INDEX, **o)),
    (L.TokenLogps, lambda **o: L.linear_selective_log_softmax(INPUT, HEAD, INDEX.unsqueeze(1).expand(4, 2), **o)),
]


@pytest.mark.parametrize(("family", "call"), FAMILIES)
def test_a_result_holds_what_was_asked_for(family, call):
    first, *others = family.names
    every = call(**{f"return_{name}": True for name in others})
    assert isinstance(every, family)
    assert every._fields == family.names
    for name in others:
        loss, other = found = call(**{f"return_{name}": True})
        assert found._fields == (first, name)
        torch.testing.assert_close(loss, every[0])
        assert getattr(found, first) is loss
        torch.testing.assert_close(other, getattr(every, name))
        assert getattr(found, name) is other


def test_the_order_does_not_depend_on_the_call():
    logps, entropy, argmax = L.selective_log_softmax(LOGITS, INDEX, return_argmax=True, return_entropy=True)
    assert argmax.dtype == torch.int64
    torch.testing.assert_close(entropy, -(LOGITS.softmax(1) * LOGITS.log_softmax(1)).sum(1))
    torch.testing.assert_close(logps, LOGITS.log_softmax(1).gather(1, INDEX.unsqueeze(1)).squeeze(1))


def test_a_result_that_was_not_asked_for_is_named():
    found = L.cross_entropy(LOGITS, INDEX, return_lse=True)
    message = "CrossEntropyOutput has no 'entropy': it holds loss, lse; ask for it with return_entropy=True"
    for name, told in (("entropy", message), ("entropies", "CrossEntropyOutput has no 'entropies'$")):
        with pytest.raises(AttributeError, match=told):
            getattr(found, name)


def results(x, index):
    """Return results of both families, of different sets."""
    return L.cross_entropy(x, index, return_lse=True), L.selective_log_softmax(x, index, return_lse=True, return_entropy=True)


class Both(torch.nn.Module):
    def forward(self, x, index):
        return results(x, index)


WAYS = {
    "copied": lambda: copy.deepcopy(results(LOGITS, INDEX)),
    "pickled": lambda: pickle.loads(pickle.dumps(results(LOGITS, INDEX))),
    "mapped": lambda: torch.utils._pytree.tree_map(torch.clone, results(LOGITS, INDEX)),
    "collated": lambda: torch.utils.data.default_collate([results(LOGITS, INDEX)]),
    "compiled": lambda: torch.compile(results, fullgraph=True, backend="eager")(LOGITS, INDEX),
    "exported": lambda: torch.export.export(Both(), (LOGITS, INDEX)).module()(LOGITS, INDEX),
    "exported strictly": lambda: torch.export.export(Both(), (LOGITS, INDEX), strict=True).module()(LOGITS, INDEX),
    "transformed": lambda: torch.func.vmap(results, (0, None))(LOGITS.unsqueeze(0), INDEX),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_result_is_the_same_named_tuple_on_every_way(way):
    for found, direct in zip(WAYS[way](), results(LOGITS, INDEX), strict=True):
        assert type(found) is type(direct)
        assert found._asdict().keys() == direct._asdict().keys()
        for a, b in zip(found, direct, strict=True):
            torch.testing.assert_close(a.view_as(b), b)
    assert repr(found).startswith("TokenLogps(logps=tensor(")
