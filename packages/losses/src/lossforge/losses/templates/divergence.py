"""What the divergences from a teacher share: the checks of their arguments, and the call. And that of several views of a sample."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lossforge.kernels.classes.calls import MOST, MOST_MORE, DivergenceCall, TopKCall, ViewsCall
from lossforge.losses.base import checks
from lossforge.losses.base.checks import nonzero
from lossforge.losses.base.options import CappedDivergenceOptions, TopKOptions, check_options, checked_call, of_classes, rows_of
from lossforge.losses.base.record import (
    SCALAR,
    SETTINGS,
    CheckedCall,
    Fusing,
    Keeping,
    Make,
    Sample,
    Template,
    TemplateDocs,
)
from lossforge.losses.formulas import FORMULAS
from lossforge.losses.templates.plain_forms import accurate, reduced, reduced_call, relative, with_weight
from lossforge.losses.templates.plain_forms.infinite import with_call

REDUCTIONS = ("none", "batchmean", "mean", "sum")
C = TypeVar("C", DivergenceCall, TopKCall)


def divergence_loss(call: C, options: TopKOptions | CappedDivergenceOptions, temperature_squared: bool) -> CheckedCall[C]:
    """Check arguments of a loss. call: with the function's arguments as they are; of a TopKCall the teacher is checked."""
    x = call.x
    call = call._replace(weight=options.get("weight"), labels=options.get("labels"))
    class_dim = of_classes(x)
    if isinstance(call, DivergenceCall):
        checks.floating_beside("target_logits", call.target, x)
        checks.fits("target_logits", call.target, call.target.shape == x.shape, "have the shape of input, {}", x.shape)
    temperature = checks.number("temperature", call.temperature, 0.0, exclusive=True)
    checks.one_of("reduction", call.reduction, REDUCTIONS)
    batchmean = call.reduction == "batchmean"
    call = call._replace(temperature=temperature, reduction="mean" if batchmean else call.reduction)
    dense = isinstance(call, DivergenceCall)
    divisor = check_options(x, call.reduction, options, CappedDivergenceOptions if dense else TopKOptions)
    call = call._replace(**_capping(options, ("", "target_") if dense else ("",)))
    call = call._replace(**hard_weights(options.get("hard_weight", 0.0), temperature, temperature_squared))
    call = call._replace(ignore_index=checks.whole_number("ignore_index", call.ignore_index))
    if call.labels is None:
        checks.ignores_none(call.ignore_index, "labels, got none")
    call = _with_rows(call, rows_of(x, class_dim))
    if call.hard_weight is not None:
        labels_of_classes(call.labels, x, x.shape[class_dim], call.ignore_index, rows_of(x, class_dim), options.get("validate"))
    if isinstance(call, TopKCall) and not call.renormalize:
        _check_log_probabilities(call, class_dim, options.get("validate"))
    scale = 1.0
    if batchmean and options.get("normalizer") is None:
        for n in x.shape[2:]:
            scale = scale * n
    if x.ndim == 1:
        call = call._replace(**{name: t.unsqueeze(0) for name, t in call._asdict().items() if name in ROWS and t is not None})
    checked = checked_call(call._replace(loss_scale=scale), options, divisor, x.ndim == 1)
    if not temperature_squared:
        return checked
    scale = checked.call.loss_scale * temperature * temperature
    checks.factor("temperature² over the normalizer", scale)
    return checked._replace(call=checked.call._replace(loss_scale=scale))


def _check_log_probabilities(call: TopKCall, dim: int, validate: bool | None) -> None:
    """Raise where the host may read the values, and those of a row that counts are no log-probabilities. On CUDA the row is nan."""
    values = call.target.detach()
    if not checks.to_read(values, validate):
        return
    total = torch.where(call.indices == -1, -torch.inf, values.float()).exp().sum(dim)
    wrong = total > MOST
    if call.labels is not None:
        wrong &= call.labels != call.ignore_index
    if call.weight is not None:
        wrong &= call.weight != 0
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            "values must be log-probabilities of the K classes at temperature T, whose exponentials add up to at most 1, got "
            f"{float(total[at]):.4g} at row {at[0] if len(at) == 1 else at}: give log_softmax(logits / T) at the K, or renormalize=True"
        )


def _capping(options: Any, prefixes: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a call that say how logits are scaled and capped. prefixes: of the options' names."""
    given = {f"{prefix}{name}": default for prefix in prefixes for name, default in (("scale", 1.0), ("softcap", None))}
    given = {name: options.get(name, default) for name, default in given.items()}
    found = {name: None if v is None and "softcap" in name else checks.number(name, v, 0.0, exclusive=True) for name, v in given.items()}
    return {"logit_scale" if name == "scale" else name: v for name, v in found.items()}


def labels_of_classes(
    labels: Tensor | None, x: Tensor, classes: int, ignore_index: int, rows: Sequence[int], validate: bool | None = None
) -> Tensor:
    """Return the labels of a cross entropy beside the divergence, once they are checked."""
    if labels is None:
        raise ValueError("hard_weight needs labels, the classes of its cross entropy, got none")
    return checks.indices("labels", labels, x, checks.Allowed(0, classes, ignore_index, validate), rows)


def hard_weights(share: object, temperature: Any, temperature_squared: bool) -> dict[str, Any]:
    """Return the weights of the divergence and of the labels' cross entropy, which T² does not multiply; none for a share of 0."""
    hard = checks.number("hard_weight", share, 0.0, 1.0)
    if not nonzero(hard):
        return {}
    return {"soft_weight": 1 - hard, "hard_weight": hard / (temperature * temperature) if temperature_squared else hard}


ROWS = ("x", "target", "indices", "labels", "weight", "target_lse")


def _with_rows(call: Any, rows: tuple[int, ...]) -> Any:
    """Check the tensors of one entry a row."""
    for name in ("weight", "labels"):
        t = getattr(call, name)
        if t is None:
            continue
        if name == "labels":
            checks.integer(name, t)
        elif not isinstance(t, Tensor):
            checks.whole(name, t)
        elif not (t.is_floating_point() or t.dtype == torch.bool):
            raise TypeError(f"weight must be of a floating dtype or bool, got {t.dtype}")
        checks.beside(name, t, call.x)
        checks.fits(name, t, t.shape == rows, "have one entry a row, shape {}", rows)
    if isinstance(call, DivergenceCall) and call.target_lse is not None:
        checks.floating_beside("teacher_lse", call.target_lse, call.x)
        checks.fits("teacher_lse", call.target_lse, call.target_lse.shape == rows, "have one entry a row, shape {}", rows)
    narrow = call.labels is None or call.labels.dtype in (torch.int32, torch.int64)
    return call if narrow else call._replace(labels=call.labels.long())


def divergence_reference(a: DivergenceCall | TopKCall) -> tuple[Tensor | None, ...]:
    """Compute a call in plain torch."""
    found = _reference(a), _entropy(a) if a.outputs[0] else None
    return found if isinstance(a, TopKCall) else (*found, _acceptance(a) if a.outputs[1] else None)


@torch.no_grad()
def _acceptance(a: DivergenceCall) -> Tensor:
    """Return Σ min(p, q) of each row, 0 in rows that are left out."""
    _, keep = rows_that_count(a)
    x, teacher = (torch.where(keep.unsqueeze(1), t.to(_dtype(a)), 0.0) for t in (a.x, a.target))
    each = seen(x, a.logit_scale, a.softcap), seen(teacher, a.target_scale, a.target_softcap)
    p, q = (relative(t, 1).div(a.temperature).softmax(1) for t in each)
    if a.target_lse is not None:
        q = q * _mass(a, capped(teacher, a.target_scale, a.target_softcap), keep)
    return torch.where(keep, torch.minimum(p, q).sum(1).clamp(0, 1), 0.0)


def _mass(a: DivergenceCall, teacher: Tensor, keep: Tensor) -> Tensor:
    """Return the teacher's probability of the classes of each row, (N, 1, d…). teacher: its logits, capped."""
    assert a.target_lse is not None
    more = torch.where(keep, teacher.div(a.temperature).logsumexp(1) - a.target_lse.to(teacher.dtype), 0.0).unsqueeze(1)
    return torch.where(more > MOST_MORE, torch.nan, more.exp().clamp(max=1))


@torch.no_grad()
def _entropy(a: DivergenceCall | TopKCall) -> Tensor:
    """Return the entropy of each row's softened softmax, 0 in rows that are left out."""
    _, keep = rows_that_count(a)
    x = torch.where(keep.unsqueeze(1), accurate(a.x), 0.0)
    lp = relative(seen(x, a.logit_scale, a.softcap), 1).div(a.temperature).log_softmax(1)
    p = lp.exp()
    return torch.where(keep, -(p * torch.where(p == 0, 0.0, lp)).sum(1), 0.0).to(_dtype(a))


def _dtype(a: DivergenceCall | TopKCall[Any]) -> torch.dtype:
    return torch.float64 if torch.float64 in (a.x.dtype, a.target.dtype) else torch.float32


def rows_that_count(a: DivergenceCall | TopKCall[Any]) -> tuple[Tensor | None, Tensor]:
    """Return the weights of rows, and which rows count."""
    keep = torch.ones((a.x.shape[0], *a.x.shape[2:]), dtype=torch.bool, device=a.x.device)
    weight = None if a.weight is None else a.weight.to(_dtype(a))
    if a.labels is not None:
        keep = keep & (a.labels != a.ignore_index)
    return weight, with_weight(keep, weight)


def _reference(a: DivergenceCall | TopKCall) -> Tensor:
    """Compute a call in plain torch."""
    dtype = _dtype(a)
    x, teacher = a.x.to(dtype), a.target.to(dtype)
    if isinstance(a, DivergenceCall):
        teacher = centred(teacher, a.center)
    weight, keep = rows_that_count(a)
    x, teacher = (torch.where(keep.unsqueeze(1), t, 0.0) for t in (x, teacher))

    def of_rows(x: Tensor, teacher: Tensor) -> Tensor:
        if isinstance(a, DivergenceCall):
            vectors = capped(x, a.logit_scale, a.softcap), capped(teacher, a.target_scale, a.target_softcap)
            teacher = seen(teacher, a.target_scale, a.target_softcap)
        x = seen(x, a.logit_scale, a.softcap)
        lp = relative(x, 1).div(a.temperature).log_softmax(1)
        hard = None if a.hard_weight is None else a.hard_weight * _nll(a, x, keep)
        if hard is not None and not nonzero(a.soft_weight):
            return hard  # a divergence of weight 0 adds nothing, even if it is infinite
        if isinstance(a, DivergenceCall):
            lq = relative(teacher, 1).div(a.temperature).log_softmax(1)
            if a.loss == "cosine":
                lp, lq = vectors
            mass = () if a.target_lse is None else (_mass(a, vectors[1], keep),)
            soft = FORMULAS[a.loss].reference(*((lq, lp) if a.swap else (lp, lq)), *a.hyper, *mass).sum(1)
        else:
            entries = TopKEntries.of(a._replace(target=teacher), keep, lp.shape[1])
            near = entries.classes.clamp(0, lp.shape[1] - 1)
            soft = top_k_values(a, torch.where(entries.member, lp.gather(1, near), -torch.inf), entries)
        return soft if hard is None else a.soft_weight * soft + hard

    counts = keep.to(dtype) if weight is None else torch.where(keep, weight, 0.0)
    values = with_call(of_rows, a, [x, teacher], None if weight is None else counts, 1)
    return reduced_call(a, values, counts, counts.sum())


def _nll(a: DivergenceCall | TopKCall, x: Tensor, keep: Tensor) -> Tensor:
    """Return the cross entropy of each row's label, nan, with a gradient of nan, where that is out of range. x: logits, capped."""
    assert a.labels is not None
    classes = x.shape[1]
    at = a.labels.long().clamp(0, classes - 1)
    right = torch.where(keep & (at != a.labels), torch.nan, 1.0).to(x.dtype)
    return -relative(x, 1).log_softmax(1).gather(1, at.unsqueeze(1)).squeeze(1) * right


def centred(teacher: Tensor, center: Tensor | None) -> Tensor:
    """Return a teacher's logits (N, C, d…) less the centre (C,) of each class."""
    return teacher if center is None else teacher - center.to(teacher.dtype).view(-1, *[1] * (teacher.ndim - 2))


def capped(x: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return logits scaled, then soft-capped."""
    x = x * scale
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def seen(x: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Return logits scaled and soft-capped. Without a cap they are scaled less the largest, which a common offset costs no digits."""
    return capped(relative(x, 1) if softcap is None and nonzero(scale - 1) else x, scale, softcap)


class TopKEntries(NamedTuple):
    """A teacher's entries of each row.

    Attributes:
        classes: (N, K, d…), class indices, -1 for no entry.
        log_q: the teacher's log-probabilities, renormalised where they are to be; -inf for no entry.
        member: which entries are classes.
        wrong: (N, d…), whether an entry is out of range.
    """

    classes: Tensor
    log_q: Tensor
    member: Tensor
    wrong: Tensor

    @staticmethod
    def of(a: TopKCall[Any], keep: Tensor, count: int) -> "TopKEntries":
        """Return the entries of the rows to keep, `count` the number of classes."""
        given = torch.where(keep.unsqueeze(1), a.target.to(_dtype(a)), 0.0)
        index = torch.where(keep.unsqueeze(1), a.indices.long(), -1)
        member = (index >= 0) & (index < count)
        lq = torch.where(index == -1, -torch.inf, given)
        index = torch.where(lq == -torch.inf, -1, index)
        member = member & (index != -1)
        if a.renormalize:
            # a row without entries: nothing, rather than nan from a softmax of nothing
            some = (lq > -torch.inf).any(1, keepdim=True)
            lq = torch.where(some, relative(torch.where(some, lq, 0.0), 1).div(a.temperature).log_softmax(1), -torch.inf)
        else:
            lq = torch.where(lq.exp().sum(1, keepdim=True) > MOST, torch.nan, lq)
        return TopKEntries(index, lq, member, ((index != -1) & ~member).any(1))


def top_k_values(a: TopKCall[Any], own: Tensor, entries: TopKEntries) -> Tensor:
    """Return the divergences of rows. own: the student's log-probabilities at the entries, -inf where there is none."""
    values = FORMULAS[a.loss].reference(own, entries.log_q, a.tail, a.reverse).sum(1)
    return torch.where(entries.wrong, torch.nan, values)


_OTHER = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float64: torch.float64}


def divergence_samples(make: Make) -> Iterator[Sample]:
    """Yield every weight, label and layout."""
    labels = make.index(0, 10, 7)
    labels[2] = -100
    weight = make.unit(7)
    weight[3] = 0
    yield Sample("dense", make.logits(7, 10), make.logits(7, 10))
    yield Sample("teacher in another dtype", make.logits(7, 10), make.logits(7, 10).to(_OTHER[make.dtype]))
    yield Sample("one class", make.logits(3, 1), make.logits(3, 1))
    yield Sample("one row", make.logits(1001), make.logits(1001))
    yield Sample("many classes", make.logits(2, 20_001), make.logits(2, 20_001))
    yield Sample("many classes, aligned", make.logits(2, 20_480), make.logits(2, 20_480), {"weight": make.unit(2)})
    yield Sample("row stride", make.logits(5, 20)[:, :11], make.logits(5, 30)[:, 8:19])
    yield Sample("class stride", make.logits(5, 20)[:, ::2], make.logits(5, 10))
    yield Sample("transposed", make.logits(11, 5).t(), make.logits(5, 11))
    yield Sample("expanded", make.logits(5, 11), make.logits(11).expand(5, 11))
    yield Sample("weights", make.logits(7, 10), make.logits(7, 10), {"weight": weight})
    yield Sample("mask", make.logits(7, 10), make.logits(7, 10), {"weight": weight > 0.3})
    yield Sample("labels", make.logits(7, 10), make.logits(7, 10), {"labels": labels})
    both = {"labels": labels.int(), "weight": weight, "ignore_index": 3}
    yield Sample("labels and weights", make.logits(7, 10), make.logits(7, 10), both)
    yield Sample("image", make.logits(2, 5, 3, 4), make.logits(2, 5, 3, 4))
    yield Sample("image, weights", make.logits(2, 5, 3, 4), make.logits(2, 5, 3, 4), {"weight": make.unit(2, 3, 4)})
    hard = {"labels": labels, "weight": weight, "hard_weight": 0.3}
    yield Sample("hard labels", make.logits(7, 10), make.logits(7, 10), hard)
    yield Sample("hard labels, softened", make.logits(7, 10), make.logits(7, 10), {**hard, "temperature": 2.0, "softcap": 3.0})
    yield Sample("hard labels, many classes", make.logits(2, 20_001), make.logits(2, 20_001), {"labels": labels[:2], "hard_weight": 0.6})
    image = make.index(0, 5, 2, 4, 8)
    image[0, 1, ::3] = -100
    yield Sample("image, rows at once", make.logits(2, 5, 4, 8), make.logits(2, 5, 4, 8), {"labels": image})
    yield Sample("image, hard labels", make.logits(2, 5, 4, 8), make.logits(2, 5, 4, 8), {"labels": image, "hard_weight": 0.3})
    yield Sample("image, rows at once, many classes", make.logits(1, 70, 4, 8), make.logits(1, 70, 4, 8), {"labels": image[:1]})
    yield Sample("image, channels last", make.logits(2, 5, 3, 4).to(memory_format=torch.channels_last), make.logits(2, 5, 3, 4))
    yield Sample("image, sliced", make.logits(2, 5, 3, 8)[..., ::2], make.logits(2, 5, 4, 3).transpose(2, 3))
    divisor = torch.tensor(3.0, device=make.device)
    yield Sample("normalizer", make.logits(7, 10), make.logits(7, 10), {"normalizer": divisor, "labels": labels})
    yield Sample("normalizer, number", make.logits(7, 10), make.logits(7, 10), {"normalizer": 5})


def topk_samples(make: Make) -> Iterator[Sample]:
    """Yield every number of entries, weight, label and layout."""

    def sample(name: str, x: Tensor, k: int, kwargs: dict[str, Any] | None = None) -> Sample:
        """Return the k largest of the teacher's log-probabilities, made here."""
        dim = 0 if x.ndim == 1 else 1
        values, indices = make.logits(*x.shape).float().log_softmax(dim).topk(k, dim)
        return Sample(name, x, values.to(make.dtype), {"indices": indices, **(kwargs or {})})

    weight, labels = make.unit(7), make.index(0, 10, 7)
    weight[3], labels[2] = 0, -100
    yield sample("dense", make.logits(7, 10), 4)
    yield sample("one entry", make.logits(7, 10), 1)
    yield sample("all entries", make.logits(3, 8), 8)
    yield sample("one row", make.logits(1001), 20)
    yield sample("many classes", make.logits(2, 9001), 33)
    yield sample("many classes, aligned, tail", make.logits(2, 20_480), 16, {"tail": True, "weight": make.unit(2)})
    yield sample("row stride", make.logits(5, 20)[:, :11], 3)
    yield sample("transposed", make.logits(11, 5).t(), 3)
    yield sample("labels", make.logits(7, 10), 4, {"labels": labels})
    hard = {"labels": labels, "hard_weight": 0.3}
    yield sample("hard labels", make.logits(7, 10), 4, {**hard, "weight": weight})
    yield sample("hard labels, softened", make.logits(7, 10), 4, {**hard, "temperature": 2.0, "softcap": 3.0, "tail": True})
    many = {"labels": labels[:2], "hard_weight": 0.6, "temperature": 0.7, "scale": 1.2}
    yield sample("hard labels, many classes", make.logits(2, 9001), 33, many)
    yield sample("weights", make.logits(7, 10), 4, {"weight": weight, "labels": labels.int(), "ignore_index": 3})
    image = make.index(0, 5, 2, 4, 8)
    image[0, 1, ::3] = -100
    yield sample("image", make.logits(2, 5, 3, 4), 2)
    yield sample("image, rows at once", make.logits(2, 5, 4, 8), 2, {"labels": image})
    yield sample("image, rows at once, many classes", make.logits(1, 70, 4, 8), 5, {"labels": image[:1], "tail": True})
    yield sample("image, channels last", make.logits(2, 5, 3, 4).to(memory_format=torch.channels_last), 2)
    yield sample("normalizer", make.logits(7, 10), 4, {"normalizer": torch.tensor(3.0, device=make.device)})
    absent = sample("absent entries", make.logits(7, 10), 4)
    absent.kwargs["indices"][1:3, 2:] = -1
    absent.kwargs["indices"][4] = -1
    yield absent


def divergence_divisor(call: Any) -> Tensor | int:
    """Return what a mean divides by: see Fusing."""
    if not call.counted:
        rows: int = call.x.shape[0]
        return rows
    dtype = torch.promote_types(call.x.dtype, torch.float32)
    weight = torch.ones((), dtype=torch.float32, device=call.x.device) if call.weight is None else call.weight.to(dtype)
    return (weight if call.labels is None else torch.where(call.labels == call.ignore_index, 0.0, weight)).sum()


QUIET = ("scale", "softcap", "target_scale", "target_softcap", "hard_weight")
DOCS = TemplateDocs(
    arguments={
        "input": "the student's logits (C,), (N, C) or (N, C, d…), of any floating dtype.",
        "target_logits": "the teacher's, in the shape of input, of any floating dtype.",
        "temperature": "T above 0.",
        "temperature_squared": (
            "multiply by T², so that gradients keep their size. On by default, as Hinton et al. 2015 have it; off by default in the "
            "Jensen-Shannon and total variation losses."
        ),
        "reduction": (
            '"batchmean", as in torch.nn.functional.kl_div: Σ / N for N samples; "mean" over the rows (F.kl_div: over the elements); '
            '"sum"; "none": one value a row. Rows that are left out count in no mean.'
        ),
        "weight": "(N, d…), floating or bool, a factor of each row; the means divide by its sum. Rows of weight 0 are not read.",
        "labels": "integers (N, d…); rows whose label is ignore_index are left out. Other labels mean nothing without hard_weight.",
        "ignore_index": "label of the rows that are left out.",
        "scale": "above 0; the student's logits become scale · x, before the cap.",
        "softcap": "above 0; the student's logits become softcap · tanh(x / softcap), before the temperature. None for none.",
        "target_scale": "above 0; the teacher's logits become target_scale · x, before the cap.",
        "hard_weight": (
            "α in [0, 1]: the loss of a row is (1 - α) · divergence + α · cross entropy of its label. That is of logits that are scaled "
            "and capped, but not softened, and T² does not multiply it. Labels are then classes, and needed. 0: none."
        ),
        "outputs": (
            'names of what to give as well: "entropy", of each row\'s softmax(input / T), without gradient; 0 in rows that are left out.'
        ),
        "target_softcap": (
            "above 0; the teacher's logits become target_softcap · tanh(x / target_softcap), before the temperature. None for none."
        ),
    },
    returns=f'{SCALAR}; with reduction "none" one value a row, in float32.',
    example=("student, teacher = torch.randn(8, 10, requires_grad=True), torch.randn(8, 10)", "student, teacher"),
    targets="a teacher's logits",
    keeping=Keeping({**SETTINGS, "target_scale": 1.0, "target_softcap": None, "hard_weight": 0.0}, per_call=("weight",), quiet=QUIET),
)
TOPK_DOCS = replace(
    DOCS,
    example=(
        "student, teacher = torch.randn(8, 10, requires_grad=True), torch.randn(8, 10).log_softmax(1)",
        "student, *teacher.topk(3, dim=1)",
    ),
    targets="a teacher's k largest",
    keeping=Keeping({**SETTINGS, "hard_weight": 0.0}, per_call=("weight",), forward="input: Tensor, *teacher: Tensor", quiet=QUIET),
)
DIVERGENCE = Template(
    "divergence",
    "classes.divergence.launch",
    DivergenceCall,
    results=("loss", "entropy", "acceptance"),
    kept=("divisor", "stats"),
    typed=("target",),
    fusing=Fusing(divergence_divisor, rows=("target", "labels", "weight", "target_lse"), teacher=True),
    reference=divergence_reference,
    samples=divergence_samples,
    docs=DOCS,
)
TOPK = Template(
    "topk",
    "classes.topk",
    TopKCall,
    results=("loss", "entropy"),
    kept=("divisor", "stats"),
    typed=("target",),
    fusing=Fusing(divergence_divisor, rows=("target", "indices", "labels", "weight"), by_classes=False),
    reference=divergence_reference,
    samples=topk_samples,
    docs=TOPK_DOCS,
)


def views_reference(a: ViewsCall) -> Tensor:
    """Compute a call in plain torch."""
    log_p = accurate(a.x).reshape(a.splits, -1, a.x.shape[-1]).log_softmax(2)
    p = log_p.exp()
    mixture = p.mean(0).clamp(1e-7, 1).log()
    values = (p * torch.where(p == 0, 0.0, log_p - mixture)).sum((0, 2)) / a.splits
    return reduced(values, a.loss_scale, torch.tensor(len(values), device=values.device), "mean", False)


VIEWS = Template(
    "views",
    "classes.views",
    ViewsCall,
    kept=("stats",),
    reference=views_reference,
    docs=TemplateDocs(targets="class index", returns=f"{SCALAR}."),
)
