"""Results beside the loss: those that were asked for, in a stated order, as a named tuple everywhere."""

import copy
import pickle
import re
import typing

import pytest
import torch

from lossforge import losses as L
from lossforge.losses.base import option_types
from lossforge.losses.base.outputs import Outputs

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
    every = call(outputs=tuple(others))
    assert isinstance(every, family)
    assert every._fields == family.names
    for name in others:
        loss, other = found = call(outputs=(name,))
        assert found._fields == (first, name)
        torch.testing.assert_close(loss, every[0])
        assert getattr(found, first) is loss
        torch.testing.assert_close(other, getattr(every, name))
        assert getattr(found, name) is other


TYPES = {
    L.CrossEntropyOutput: option_types.RowOutput,
    L.TokenLogps: option_types.RowOutput,
    L.DivergenceOutput: option_types.DivergenceOutputs,
    L.DraftOutput: option_types.DraftOutputs,
    L.MTPOutput: option_types.MTPOutputs,
    L.LoadBalancingOutput: option_types.RouterOutput,
    L.PolicyLossOutput: option_types.PolicyOutput,
    L.ValueLossOutput: option_types.ValueOutput,
}


@pytest.mark.parametrize("family", Outputs.__subclasses__())
def test_type_checkers_know_the_names(family):
    assert family.names[1:] == typing.get_args(TYPES[family])


WRONG = [
    ("lse", TypeError, "outputs must be a tuple of names, such as ('z_loss',), got 'lse'"),
    (True, TypeError, "outputs must be a tuple of names, such as ('z_loss',), got True"),
    (("lsee",), ValueError, f"outputs must be of {str(L.TokenLogps.names[1:])[1:-1]}, got 'lsee'; did you mean 'lse'?"),
    (("loss",), ValueError, "got 'loss'"),
    (("lse", 3), ValueError, "got 3"),
    (("lse", "lse"), ValueError, "outputs must name each result once, in the order in which they come back, ('lse',), got ('lse', 'lse')"),
    (["entropy", "lse"], ValueError, "in which they come back, ('lse', 'entropy'), got ('entropy', 'lse')"),
]


@pytest.mark.parametrize(("outputs", "kind", "message"), WRONG, ids=lambda v: str(v)[:20])
def test_wrong_names_are_refused(outputs, kind, message):
    for _, call in FAMILIES:
        with pytest.raises(kind, match=re.escape(message)):
            call(outputs=outputs)


def test_a_list_of_names_is_a_tuple_of_them():
    for _, call in FAMILIES:
        found, expected = call(outputs=["lse", "argmax"]), call(outputs=("lse", "argmax"))
        assert type(found) is type(expected)
        assert all(map(torch.equal, found, expected))
        assert isinstance(call(outputs=[]), torch.Tensor)


@pytest.mark.parametrize(
    "function", [L.cross_entropy, L.CrossEntropyLoss, L.linear_selective_log_softmax, L.js_div_with_logits, L.grpo_loss]
)
def test_a_flag_of_old_is_answered_with_outputs(function):
    with pytest.raises(TypeError, match=r"'return_entropy': outputs takes the names of the results beside the first\. It takes "):
        function(LOGITS, LOGITS, return_entropy=True)


def test_the_order_is_the_one_asked_for():
    logps, entropy, argmax = L.selective_log_softmax(LOGITS, INDEX, outputs=("entropy", "argmax"))
    assert argmax.dtype == torch.int64
    torch.testing.assert_close(entropy, -(LOGITS.softmax(1) * LOGITS.log_softmax(1)).sum(1))
    torch.testing.assert_close(logps, LOGITS.log_softmax(1).gather(1, INDEX.unsqueeze(1)).squeeze(1))


def test_a_result_that_was_not_asked_for_is_named():
    found = L.cross_entropy(LOGITS, INDEX, outputs=("lse",))
    message = "CrossEntropyOutput has no 'entropy': it holds loss, lse; ask for it with outputs=\\('lse', 'entropy'\\)"
    for name, told in (("entropy", message), ("entropies", "CrossEntropyOutput has no 'entropies'$")):
        with pytest.raises(AttributeError, match=told):
            getattr(found, name)


def results(x, index):
    """Return results of both families, of different sets."""
    return L.cross_entropy(x, index, outputs=("lse",)), L.selective_log_softmax(x, index, outputs=("lse", "entropy"))


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
