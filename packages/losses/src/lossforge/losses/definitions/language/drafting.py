"""What draft models train with beside their loss: a vocabulary that is a part of the teacher's, and weights of positions."""

from typing import Any, Literal

import torch
from torch import Tensor

from lossforge.losses.base import checks
from lossforge.losses.definitions.language.linear import linear_selective_log_softmax
from lossforge.losses.engine.calls import compute
from lossforge.losses.engine.linear.teacher import LinearTeacher

__all__ = ["DraftVocabulary", "draft_confidence_weights", "draft_decay_weights"]


class DraftVocabulary:
    """The classes of a draft model among its teacher's, with the teacher's head of these classes.

    The rows of the head are copied once: D · H numbers beside the C · H of the whole head, 250 MiB for 32,000 classes of 4,096 numbers in
    bfloat16. Make it again where the head changes.

    Args:
        weight: (C, H), of the teacher's head.
        bias: (C,), of the teacher's head; None for none.
        d2t: (D,), how much larger the teacher's class index is than the draft's, as EAGLE-3, SpecForge and speculators store it.
        t2d: (C,) bool, whether the draft has a class; the draft's are in the same order. One of d2t and t2d is needed; where both are
            given, they must agree.
        scale: above 0; the teacher's logits become scale · x, before the cap.
        softcap: above 0; the teacher's logits become softcap · tanh(x / softcap); None for none.

    Attributes:
        classes: (D,), the teacher's class index of each of the draft's classes.

    Examples:
        >>> import torch
        >>> from lossforge.losses import DraftVocabulary, linear_draft_loss
        >>> head, draft_head = torch.randn(100, 48), torch.randn(30, 32, requires_grad=True)
        >>> teacher_hidden, hidden = torch.randn(6, 48), torch.randn(6, 32)
        >>> vocabulary = DraftVocabulary(head, t2d=torch.arange(100) < 30)
        >>> lse, known = vocabulary.statistics(teacher_hidden)
        >>> teacher = vocabulary.teacher(teacher_hidden)
        >>> linear_draft_loss(hidden, draft_head, teacher, teacher_lse=lse, loss_weight=known).backward()
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        d2t: Tensor | None = None,
        t2d: Tensor | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        self.classes = _classes_of(d2t, t2d, weight)
        self._head = LinearTeacher(weight[:0], weight.detach(), None if bias is None else bias.detach(), scale, softcap)
        own = None if bias is None else bias.detach()[self.classes]
        self._own = self._head._replace(weight=weight.detach()[self.classes], bias=own)
        self._draft_class = torch.full((len(weight),), -1, device=weight.device)
        self._draft_class[self.classes] = torch.arange(len(self.classes), device=weight.device)

    def teacher(self, input: Tensor) -> LinearTeacher:
        """Return the teacher of the draft's classes: alone, its softmax is over these, as speculators and EAGLE-3 have it.

        Args:
            input: (…, H), what the teacher's head takes.
        """
        return self._own._replace(input=input.detach())

    def statistics(self, input: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return what is known of the teacher's softmax over all its classes, without its logits.

        Args:
            input: (…, H), what the teacher's head takes.
            temperature: T above 0, that of the loss.

        Returns:
            its log-sum-exp (…), the `teacher_lse` of SpecForge's acceptance; and whether the draft has its most likely class, (…) bool, by
            which EAGLE-3 and SpecForge leave tokens out: the loss's `loss_weight`, or a factor of it.
        """
        _, weight, bias, scale, softcap = self._head
        index = torch.zeros(input.shape[:-1], dtype=torch.int64, device=input.device)
        with torch.no_grad():
            found: Any = compute(
                linear_selective_log_softmax(
                    input.detach(), weight, index, bias, temperature=temperature, scale=scale, softcap=softcap, outputs=("lse", "argmax")
                )
            )
        return found.lse, self._draft_class[found.argmax] >= 0

    def labels(self, target: Tensor, ignore_index: int = -100) -> Tensor:
        """Return the draft's class indices of the teacher's, and ignore_index for those that the draft does not have.

        Args:
            target: class indices of the teacher of any shape; those outside of [0, C), such as ignored ones, become ignore_index.
            ignore_index: the label of tokens that are left out.
        """
        checks.integer("target", target)
        exists = (target >= 0) & (target < len(self._draft_class))
        found = self._draft_class[torch.where(exists, target, 0).long()]
        return torch.where(exists & (found >= 0), found, ignore_index)


def _classes_of(d2t: Tensor | None, t2d: Tensor | None, weight: Tensor) -> Tensor:
    """Return the teacher's class of each of the draft's classes."""
    checks.fits("weight", weight, weight.ndim == 2, "have shape (C, H)")
    of_d2t = of_t2d = None
    if t2d is not None:
        if t2d.dtype != torch.bool:
            raise TypeError(f"t2d must be of bool, got {t2d.dtype}")
        checks.fits("t2d", t2d, t2d.shape == weight.shape[:1], "have one entry a class of the teacher, shape {}", tuple(weight.shape[:1]))
        of_t2d = t2d.nonzero().squeeze(1).to(weight.device)
    if d2t is not None:
        checks.integer("d2t", d2t)
        checks.fits("d2t", d2t, d2t.ndim == 1, "have one entry a class of the draft, shape (D,)")
        of_d2t = (torch.arange(len(d2t), device=d2t.device) + d2t).to(weight.device)
        if len(of_d2t.unique()) != len(d2t) or not bool(((of_d2t >= 0) & (of_d2t < len(weight))).all()):
            raise ValueError(
                f"d2t must be differences of class indices, so that d2t + arange(D) names different classes below {len(weight)}"
            )
    found = of_t2d if of_d2t is None else of_d2t
    if found is None:
        raise ValueError("a draft vocabulary needs d2t or t2d, got neither")
    if of_d2t is not None and of_t2d is not None and not torch.equal(of_d2t, of_t2d):
        raise ValueError("d2t and t2d must name the same classes in the same order")
    if not len(found):
        raise ValueError("a draft vocabulary needs at least one class, got none")
    return found


def _dense(name: str, t: object) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(t).__name__}")
    checks.strided(name, t)
    if t.is_complex():
        raise TypeError(f"{name} must be of a real dtype, got {t.dtype}")


@checks.named
def draft_decay_weights(positions: Tensor, gamma: float, *, form: Literal["exp", "power"] = "exp", first: int = 0) -> Tensor:
    """Return weights of tokens that decay with their position in a draft: exp(-(k - first) / γ), or γ^(k - first) with form "power".

    DFlash has form "exp" and first=1, because its position 0 is the anchor, whose weight is 0; DSpark "exp"; EAGLE-3's steps in
    speculators "power".

    Args:
        positions: k of each token, of any shape.
        gamma: γ above 0.
        form: "exp" or "power".
        first: the first position that counts; weights before it are 0.

    Returns:
        float32, in the shape of positions.

    Raises:
        TypeError, ValueError: γ is not above 0, or form is another.

    Examples:
        >>> import torch
        >>> from lossforge.losses import draft_decay_weights
        >>> draft_decay_weights(torch.arange(4), 0.5, form="power")
        tensor([1.0000, 0.5000, 0.2500, 0.1250])
    """
    gamma = checks.number("gamma", gamma, 0.0, exclusive=True)
    checks.one_of("form", form, ("exp", "power"))
    _dense("positions", positions)
    k = positions.to(torch.float32) - checks.number("first", first)
    return torch.where(k < 0, 0.0, torch.exp(-k / gamma) if form == "exp" else gamma**k)


@checks.named
def draft_confidence_weights(nll: Tensor, mask: Tensor | None = None, alpha: float = 0.5) -> Tensor:
    """Return D-PACE's weights of the tokens of blocks, by how likely a block's prefix is accepted (arXiv 2605.18810).

    w_k = Σ_{m ≥ k} Π_{i ≤ m} ((1 - α) exp(-nllᵢ) + α), without gradient. Tokens that the mask leaves out have weight 0, and are no
    factors.

    Args:
        nll: (…, B), cross entropy of each token of blocks of B: linear_draft_loss(..., kind="ce", reduction="none") or
            linear_cross_entropy's.
        mask: (…, B), whether a token counts; None: all do.
        alpha: α in [0, 1], which smooths the confidences exp(-nll).

    Returns:
        float32 (float64 for float64), in the shape of nll.

    Raises:
        TypeError, ValueError: the mask has another shape than nll, or α is outside of [0, 1].

    Examples:
        >>> import torch
        >>> from lossforge.losses import draft_confidence_weights
        >>> draft_confidence_weights(torch.zeros(1, 3))
        tensor([[3., 2., 1.]])
    """
    checks.whole("nll", nll)
    checks.floating("nll", nll)
    alpha = checks.number("alpha", alpha, 0.0, 1.0)
    with torch.no_grad():
        confidence = (1 - alpha) * torch.exp(-nll.to(torch.promote_types(nll.dtype, torch.float32))) + alpha
        counts = torch.ones_like(nll, dtype=torch.bool)
        if mask is not None:
            _dense("mask", mask)
            checks.fits("mask", mask, mask.shape == nll.shape, "have the shape of nll, {}", tuple(nll.shape))
            counts = mask > 0
        prefix = torch.where(counts, torch.where(counts, confidence, 1.0).cumprod(-1), 0.0)
        return torch.where(counts, prefix.flip(-1).cumsum(-1).flip(-1), 0.0)
