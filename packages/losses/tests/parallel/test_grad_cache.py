"""Gradients of encoders chunk by chunk are those of the whole batch. test_contrastive.py has those of several processes."""

import contextlib
import functools

import pytest
import torch
from torch import nn

from lossforge.losses import clip_loss_from_features, grad_cache_backward, info_nce_loss, multi_similarity_loss

generator = torch.Generator().manual_seed(0)
close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


class Encoder(nn.Module):
    """An encoder that drops out, and counts the rows that it has a graph of."""

    def __init__(self, p=0.0):
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(6, 8), nn.Dropout(p), nn.Linear(8, 4)
        self.graphs = []

    def forward(self, x, mask=None):
        if torch.is_grad_enabled():
            self.graphs.append(len(x))
        x = self.second(self.dropout(self.first(x)).relu())
        return x if mask is None else x * mask


def drawn(*shape, device):
    return torch.randn(shape, generator=generator).to(device)


def gradients(*modules):
    return [p.grad for module in modules for p in module.parameters()]


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_two_encoders_and_a_learned_scale(chunk, device):
    encoders = [Encoder().to(device) for _ in range(2)]
    inputs, scale = [drawn(7, 6, device=device) for _ in range(2)], torch.tensor(5.0, device=device, requires_grad=True)
    loss = functools.partial(clip_loss_from_features, logit_scale=scale)
    whole = loss(*[encoder(x) for encoder, x in zip(encoders, inputs, strict=True)])
    exact = torch.autograd.grad(whole, [p for encoder in encoders for p in encoder.parameters()] + [scale])
    for encoder in encoders:
        encoder.graphs.clear()
    found = grad_cache_backward(loss, encoders, inputs, chunk)
    assert not found.requires_grad
    torch.testing.assert_close(found, whole.detach())
    close([*gradients(*encoders), scale.grad], [*exact])
    assert encoders[0].graphs == [min(chunk, 7 - start) for start in range(0, 7, chunk)]
    grad_cache_backward(loss, encoders, inputs, chunk)  # gradients are added, as by backward()
    close(gradients(*encoders), [2 * g for g in exact[:-1]])


def test_the_same_random_numbers(device):
    """A chunk drops out the same features in both passes, and random numbers go on as after one pass."""
    encoder, x, labels = Encoder(0.5).to(device), drawn(8, 6, device=device), torch.arange(8, device=device) % 3
    torch.manual_seed(3)
    whole = multi_similarity_loss(torch.cat([encoder(part) for part in x.split(3)]), labels)
    exact, after = torch.autograd.grad(whole, [*encoder.parameters()]), torch.rand(1, device=device)
    torch.manual_seed(3)
    found = grad_cache_backward(lambda z: multi_similarity_loss(z, labels), [encoder], [x], chunk_size=3)
    torch.testing.assert_close(torch.rand(1, device=device), after)
    torch.testing.assert_close(found, whole.detach())
    close(gradients(encoder), [*exact])


def test_inputs_of_several_tensors_and_one_encoder_for_both(device):
    encoder, frozen = Encoder().to(device), Encoder().to(device).requires_grad_(False)
    x, y, mask = drawn(5, 6, device=device), drawn(5, 6, device=device), drawn(5, 4, device=device)
    given = [{"x": x, "mask": mask}, (y, mask)]
    exact = torch.autograd.grad(info_nce_loss(encoder(x, mask), encoder(y, mask)), [*encoder.parameters()])
    grad_cache_backward(info_nce_loss, [encoder, encoder], given, 2)
    close(gradients(encoder), [*exact])
    encoder.zero_grad()
    exact = torch.autograd.grad(info_nce_loss(encoder(x, mask), frozen(y, mask)), [*encoder.parameters()])
    grad_cache_backward(info_nce_loss, [encoder, frozen], given, 2)
    close(gradients(encoder), [*exact])
    assert gradients(frozen) == [None] * 4


def test_an_encoder_that_writes_into_its_input(device):
    """As sentence-transformers' pooling does, which clears the prompt's places in the attention mask."""
    encoder, x, mask = Encoder().to(device), drawn(5, 6, device=device), torch.ones(5, 4, device=device)

    def writing(x, mask):
        features = encoder(x, mask.clone())
        mask[:, :2] = 0
        return features

    exact = torch.autograd.grad(multi_similarity_loss(encoder(x, mask), torch.arange(5) % 2), [*encoder.parameters()])
    for given in ([{"x": x, "mask": mask}], [(x, mask)]):
        before = x.clone(), mask.clone()
        encoder.zero_grad()
        grad_cache_backward(lambda z: multi_similarity_loss(z, torch.arange(5) % 2), [writing], given, 2)
        close(gradients(encoder), [*exact])
        assert all(map(torch.equal, (x, mask), before))
    encoder.zero_grad()
    exact = torch.autograd.grad(info_nce_loss(encoder(x), encoder(x)), [*encoder.parameters()])
    halved = lambda x: encoder(x.mul_(0.5) * 2)  # noqa: E731
    grad_cache_backward(info_nce_loss, [halved, halved], [x, x], 2)
    close(gradients(encoder), [*exact])


class Averaging(nn.Module):
    """A module that averages gradients over processes as DistributedDataParallel does: in each backward outside of no_sync."""

    def __init__(self, module):
        super().__init__()
        self.module, self.alone, self.averages = module, False, []

    @contextlib.contextmanager
    def no_sync(self):
        self.alone = True
        yield
        self.alone = False

    def forward(self, x):
        if torch.is_grad_enabled():
            self.averages.append(not self.alone)
        return self.module(x)


def test_gradients_are_averaged_once_after_the_last_chunk_of_an_encoder(device):
    """Also of an encoder of both inputs, whose gradients are complete after the second one alone."""
    inputs = [drawn(5, 6, device=device) for _ in range(2)]
    both, other = (Averaging(Encoder().to(device)) for _ in range(2))
    grad_cache_backward(info_nce_loss, [both, both], inputs, 2)
    assert both.averages == [False] * 5 + [True]
    both.averages.clear()
    grad_cache_backward(info_nce_loss, [both, other], inputs, 2)
    assert both.averages == other.averages == [False, False, True]


def test_a_scaled_loss(device):
    encoder, inputs = Encoder().to(device), [drawn(5, 6, device=device) for _ in range(2)]
    whole = info_nce_loss(*map(encoder, inputs))
    exact = torch.autograd.grad(whole, [*encoder.parameters()])
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    found = grad_cache_backward(info_nce_loss, [encoder, encoder], inputs, 2, scaler=scaler)
    torch.testing.assert_close(found, whole.detach())
    close([g / 1024 for g in gradients(encoder)], [*exact])


X = torch.zeros(4, 3)


@pytest.mark.parametrize(
    ("kind", "message", "call"),
    [
        (ValueError, "chunk_size must be at least 1, got 0", lambda f: grad_cache_backward(info_nce_loss, [f], [X], 0)),
        (ValueError, "encoders and inputs must be equally many", lambda f: grad_cache_backward(info_nce_loss, [f], [X, X], 1)),
        (ValueError, r"inputs\[0\] must have rows", lambda f: grad_cache_backward(info_nce_loss, [f], [X[:0]], 1)),
        (ValueError, r"inputs\[0\] must have rows, equally many", lambda f: grad_cache_backward(info_nce_loss, [f], [(X, X[:3])], 1)),
        (TypeError, r"inputs\[0\] must be a tensor, or a mapping", lambda f: grad_cache_backward(info_nce_loss, [f], [3], 1)),
        (TypeError, "must be a tensor, got str", lambda f: grad_cache_backward(info_nce_loss, [f], [["a"]], 1)),
        (TypeError, "an encoder must return a tensor", lambda f: grad_cache_backward(info_nce_loss, [lambda x: (x,)], [X], 1)),
    ],
)
def test_refused(kind, message, call):
    with pytest.raises(kind, match=message):
        call(nn.Linear(3, 2))
