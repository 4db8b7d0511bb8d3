"""A module's options are attributes that each call reads: any may be changed, and the next call is as the function called with it."""

import copy
import inspect
import pickle
import typing

import pytest
import torch

from lossforge import losses as L
from lossforge.losses.base.declare import DECLARED
from lossforge.losses.base.option_types import Range
from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import plain_sample

BY_CALL = {
    "teacher_lse",
    "target_b",
    "lam",
    "score",
    "preference",
    "group",
    "normalizer",
    "labels",
    "offset",
    "negative_only",
    "token_weight",
}
BY_CALL |= {"negatives", "negatives_guide", "logit_scale", "logit_bias", "gathered", "gathered_labels", "gathered1", "gathered2"}
"""Arguments of functions that belong to a call, beside weights that are not of the classes or elements."""
LEGACY = {"size_average", "reduce"}
UNSEEN = {"empty", "gradient", "inplace", "validate"}
"""Options that change how a result is computed, or what nothing gives, and no value of these calls."""

generator = torch.Generator().manual_seed(0)
X, Y = torch.randn(4, 4, generator=generator), torch.rand(4, 4, generator=generator)
INDEX, LABELS = torch.tensor([0, 3, 1, 3]), torch.tensor([0, 1, 2, 1])
UNIT = torch.rand(4, generator=generator) + 0.5
CORNERS = torch.rand(2, 4, 2, generator=generator)
BOXES1, BOXES2 = (torch.cat([low, low + 0.5], -1) for low in CORNERS)
ROTATED1, ROTATED2 = (torch.cat([low, low + 0.5, low[..., :1]], -1) for low in CORNERS)
MAPS, MASKS = torch.randn(2, 4, 3, 3, generator=generator), torch.randint(0, 3, (2, 3, 3), generator=generator)
TOP = X.log_softmax(1).topk(2, 1)
LOGPS = [-torch.rand(5, generator=generator) - 0.1 * i for i in range(4)]

CALLS = {
    "elementwise": [((X, Y), {}), ((X, INDEX), {})],
    "rowwise": [((X, INDEX), {})],
    "margins": [((X, INDEX), {})],
    "nll": [((X, INDEX), {})],
    "boxes": [((BOXES1, BOXES2), {})],
    "rotated": [((ROTATED1, ROTATED2), {})],
    "overlap": [((MAPS, MASKS), {})],
    "divergence": [((X, Y), {"labels": LABELS})],
    "topk": [((X,), {"indices": TOP.indices, "values": TOP.values, "labels": LABELS})],
}
"""Calls that show every option of a template's modules; of other templates the plain one does."""
OF_LOSS = {
    "arcface": [((X.tanh(), INDEX % 2), {})],
    "preference_bce": [((X, INDEX), {"group": LABELS[:, None]})],
    "preference_bce_probability": [((X.sigmoid(), INDEX), {"group": LABELS[:, None]})],
    "bce_probability": [((X.sigmoid(), Y), {}), ((X.sigmoid(), INDEX), {})],
    "lovasz_softmax": [((MAPS, MASKS), {})],
    "lovasz_hinge": [((MAPS[:, 0], MASKS.clamp(max=1)), {})],
    "varifocal": [((X, Y), {}), ((X, INDEX), {"score": Y[:, 0] * (INDEX != 1)})],
    "siglip": [((X, None), {}), ((X, Y), {}), ((X, INDEX), {})],
    "kl_div": [((X.log_softmax(1), Y), {}), ((X.log_softmax(1), INDEX), {})],
}
BUILT = {
    "preference_bce": {"group_weight": UNIT},
    "preference_bce_probability": {"group_weight": UNIT},
    "logit_adjusted_ce": {"class_counts": UNIT},
    "distribution_balanced": {"class_counts": 9 * UNIT + 1, "num_samples": 50},
    "lovasz_hinge": {"per_image": True},
    "ohem_ce": {"threshold": 0.07, "min_kept": 0},
    "poisson_nll": {"log_input": False},
    "kl": {"temperature": 2.0},
    "js": {"temperature": 2.0},
    "total_variation": {"temperature": 2.0},
    "draft": {"temperature": 2.0},
    "topk_kl": {"temperature": 2.0},
}
"""With what a module is built where an option's value is seen only beside another's."""
OTHERS = {
    "reduction": "sum",
    "empty": "zero",
    "gradient": "backward",
    "validate": True,
    "dim": 0,
    "softcap": 1.5,
    "target_threshold": -0.5,
    "format": "cxcywh",
    "kind": "tv",
    "activation": "sigmoid",
    "ignore_index": 1,
    "weight": UNIT,
    "pos_weight": UNIT,
    "group_weight": UNIT.square(),
    "center": UNIT,
    "margin_strategy": "relative",
    "directions": ("query_to_doc", "doc_to_query"),
    "log_prior": UNIT.square(),
    "loss_type": "hinge",
    "outputs": ("entropy",),
}
OTHERS_OF = {("GRPOLoss", "loss_type"): "bnpo", ("GRPOLoss", "importance_sampling_level"): "sequence", ("GRPOLoss", "delta"): 1.3}
OTHERS_OF |= {("GRPOLoss", "epsilon_high"): 0.05, ("GRPOLoss", "epsilon"): 0.05, ("GRPOLoss", "outputs"): ("clipped_low",)}
OTHERS_OF |= {("GRPOLoss", "beta"): L.KLPenalty(0.17, bias_correction=True), ("DPOLoss", "f_divergence_type"): L.AlphaDivergence(0.3)}
OTHERS_OF |= {
    ("AsymmetricLossMultiLabel", "eps"): 1e-5,
    ("AsymmetricLossMultiLabel", "reduction"): "mean",
    ("CPOLoss", "label_smoothing"): 0.25,
}
OTHERS_OF |= {("DistributionBalancedLoss", "class_counts"): 5 * UNIT + 2, ("DistributionBalancedLoss", "num_samples"): 90}
OTHERS_OF |= {("LDAMLoss", "margin"): UNIT, ("PPOValueLoss", "outputs"): ("clipped",)}
OTHERS_OF |= {("OHEMCrossEntropyLoss", "threshold"): 0.12, ("OHEMCrossEntropyLoss", "min_kept"): 99}
OTHERS_OF |= {
    ("ArcFaceLoss", "sub_centers"): 2,
    ("MultiMarginLoss", "p"): 2,
    ("TripletMarginLoss", "p"): 3.0,
    ("PoissonNLLLoss", "eps"): 0.3,
}
OTHERS_OF |= {(name, "ignore_index"): 0 for name in ("DiceLoss", "DiceCELoss", "JaccardLoss", "TverskyLoss", "FocalTverskyLoss")}
OTHERS_OF |= {("LovaszSoftmaxLoss", "ignore_index"): 0, ("LovaszHingeLoss", "ignore_index"): 0, ("LovaszSoftmaxLoss", "classes"): "all"}
OTHERS_OF |= {(loss.module.__name__, "eps"): 1.0 for loss in LOSSES.values() if loss.template.name == "boxes"}
OTHERS_OF |= {(loss.module.__name__, "eps"): 9.0 for loss in LOSSES.values() if loss.template.name == "rotated"}
OTHERS_OF |= {(name, "fun"): "none" for name in ("GWDLoss", "KLDLoss")} | {("KFIoULoss", "fun"): "exp"}
BESIDE = {
    "CosineDistanceWithLogitsLoss": {name: {"softcap": 3.0, "target_softcap": 3.0} for name in ("scale", "target_scale")},
    "InfoNCELoss": {"decoupled": {"temperature": 1.0}},
    "GISTEmbedLoss": {"margin_strategy": {"margin": 0.4}},
}
"""Options beside which others are seen."""
REFUSED = {("LogitAdjustedCrossEntropyLoss", "softcap")}
"""Options that a module has as others of its template, and its function refuses."""
OF_DENSE = {("KLDivLoss", "log_target"), ("AsymmetricLossMultiLabel", "smoothing"), ("PolyBinaryCrossEntropy", "smoothing")}
OF_DENSE |= {("DistributionBalancedLoss", "smoothing")}
"""Options that class indices do not go with."""
OF_INDICES = {("VarifocalLoss", "positive_at_zero"), ("BCEWithLogitsLoss", "label_smoothing")}
"""Options that take class indices alone."""
NO_VALUE = {
    ("AsymmetricLossMultiLabel", "eps"),
    ("AsymmetricLossMultiLabel", "disable_torch_grad_focal_loss"),
    ("VarifocalLoss", "hold_weight"),
}
"""Options that change no value: timm's eps, since our logarithms are exact, and two of the gradient alone."""


def other(module, name):
    """Another value of an option than it has."""
    held = getattr(module, name)
    key = (type(module).__name__, name)
    if key in OTHERS_OF or name in OTHERS:
        return OTHERS_OF.get(key, OTHERS.get(name))
    if isinstance(held, bool):
        return not held
    if held is None or isinstance(held, torch.Tensor):
        return 0.3
    parameter = inspect.signature(DECLARED[module.function.__name__].definition).parameters.get(name)
    ranges = [each for each in typing.get_args(parameter and parameter.annotation) if isinstance(each, Range)]
    return max([0.4 * held + 0.17, *(each.least for each in ranges if each.least is not None)])


def leaves(result):
    return [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]


def same(a, b):
    a, b = leaves(a), leaves(b)
    return len(a) == len(b) and all(torch.equal(s.nan_to_num(-7.0), t.nan_to_num(-7.0)) for s, t in zip(a, b, strict=True))


def seeded(call, *args, **kwargs):
    """Call what may draw random numbers."""
    torch.manual_seed(0)
    return call(*args, **kwargs)


def check_options(make, function, calls):
    for name in make().option_names:
        seen = False
        for args, kwargs in calls:
            module = make()
            value = other(module, name)
            for beside, held in BESIDE.get(type(module).__name__, {}).get(name, {}).items():
                setattr(module, beside, held)
            before = seeded(module, *args, **kwargs)
            assert same(before, seeded(function, *args, **kwargs, **{n: getattr(module, n) for n in module.option_names}))
            if (type(module).__name__, name) in REFUSED:
                setattr(module, name, value)
                with pytest.raises((TypeError, ValueError), match=name):
                    module(*args, **kwargs)
                seen = True
                continue
            dense = len(args) > 1 and args[1] is not None and args[1].is_floating_point()
            if (type(module).__name__, name) in (OF_INDICES if dense else OF_DENSE):
                continue
            setattr(module, name, value)
            assert getattr(module, name) is value
            assert (name in dict(module.named_buffers())) == isinstance(value, torch.Tensor)
            options = {n: getattr(module, n) for n in module.option_names} | {name: value}
            after = seeded(module, *args, **kwargs)
            assert same(after, seeded(function, *args, **kwargs, **options)), name
            shown = f"{name}=<" if isinstance(value, torch.Tensor) else f"{name}={value!r}"
            assert shown in repr(module) or value == module.shared.get(name)
            seen |= not same(before, after)
        assert seen or name in UNSEEN or (type(make()).__name__, name) in NO_VALUE, f"{name} changes nothing"


@pytest.mark.parametrize("loss", LOSSES.values(), ids=lambda loss: loss.name)
def test_every_option_of_every_module(loss):
    with L.plain_torch():
        sample = plain_sample(loss)
        calls = OF_LOSS.get(loss.name) or CALLS.get(loss.template.name) or [((sample.x, sample.target), sample.kwargs)]
        check_options(lambda: loss.module(**BUILT.get(loss.name, {})), loss.function, calls)


TOKENS, ADVANTAGES, OLD = -torch.rand(3, 5, generator=generator), torch.tensor([1.0, -1.0, 0.5]), -2 - torch.rand(3, 5, generator=generator)
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]])
OTHER_MODULES = {
    L.ClipLoss: [((X,), {})],
    L.TwoWayLoss: [((X, Y > 0.5), {})],
    L.ZlprLoss: [((X, Y > 0.5), {})],
    L.InfoNCELoss: [((X, X.flip(0), X.roll(1, 0)), {})],
    L.GISTEmbedLoss: [((X, X.flip(0), X.roll(1, 0), X.roll(2, 0)), {})],
    L.NTXentLoss: [((X, X.roll(1, 0)), {})],
    L.SupConLoss: [((X, torch.arange(len(X)) % 2), {})],
    L.MultiSimilarityLoss: [((x, torch.arange(len(X)) % 2), {}) for x in (X, X.abs())],
    L.CircleLoss: [((X, torch.arange(len(X)) % 2), {})],
    L.ProxyAnchorLoss: [((X, X.flip(0), torch.arange(len(X)) % 2), {})],
    L.ClipFeaturesLoss: [((X, X.roll(1, 0), 0.5), {})],
    L.SigLIPFeaturesLoss: [((X, X.roll(1, 0), 0.5, -0.2), {})],
    L.BradleyTerryLoss: [(LOGPS[:2], {})],
    L.DPOLoss: [(LOGPS, {})],
    L.CPOLoss: [(LOGPS[:2], {})],
    L.SimPOLoss: [(LOGPS[:2], {})],
    L.ORPOLoss: [(LOGPS[:2], {})],
    L.KTOLoss: [((*LOGPS[:2], None, *LOGPS[2:], None), {})],
    L.GRPOLoss: [((TOKENS, ADVANTAGES, old, -TOKENS.square()), {"mask": MASK}) for old in (OLD, TOKENS.roll(1, 1))],
    L.TPOLoss: [(LOGPS[:3], {})],
    L.PPOValueLoss: [((TOKENS, -TOKENS.square(), OLD), {"mask": MASK})],
    L.ChannelWiseKLDivLoss: [((X.view(2, 2, 4), X.flip(0).view(2, 2, 4)), {})],
    L.DKDLoss: [((X, X.flip(0), INDEX), {})],
    L.DISTLoss: [((X, X.flip(0)), {})],
    L.KoLeoLoss: [((X,), {})],
    L.VICRegLoss: [((X, X.flip(0)), {})],
    L.BarlowTwinsLoss: [((X, X.flip(0)), {})],
    L.GramAnchoringLoss: [((X.view(2, 2, 4), X.flip(0).view(2, 2, 4)), {})],
}


@pytest.mark.parametrize("module", OTHER_MODULES, ids=lambda module: module.__name__)
def test_every_option_of_modules_beside_the_registry(module):
    with L.plain_torch():
        check_options(module, module.function, OTHER_MODULES[module])


def test_every_module_is_walked():
    public = {getattr(L.modules, name) for name in L.modules.__all__}
    public |= {t for t in vars(L.preference).values() if isinstance(t, type) and issubclass(t, torch.nn.Module)}
    public -= {getattr(L.modules, name) for name in L.modules.__all__ if name.startswith("Linear")}  # test_linear.py
    assert public == {loss.module for loss in LOSSES.values()} | set(OTHER_MODULES)


MODULES = pytest.mark.parametrize(
    ("module", "template"),
    [(loss.module, loss.template.name) for loss in LOSSES.values()] + [(module, "") for module in OTHER_MODULES],
    ids=lambda v: getattr(v, "__name__", v),
)


def options_of(function):
    """Names and defaults of what is no tensor of the call: the signature's, and those of the further keywords."""
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind == parameter.VAR_KEYWORD:
            found |= dict.fromkeys(typing.get_type_hints(typing.get_args(parameter.annotation)[0]), inspect.Parameter.empty)
        else:
            found[name] = parameter.default
    return found


@MODULES
def test_a_module_takes_what_its_function_takes(module, template):
    """With the same defaults; the function's own tensors come with the call."""
    definition = DECLARED[module.function.__name__].definition
    ours, theirs = module(), options_of(definition)
    by_call = BY_CALL | (set() if template in ("elementwise", "rowwise", "nll", "overlap", "margins", "") else {"weight"})
    by_call |= {"mask"} | ({"policy_nll_loss", "kl"} if not template else set())
    by_call |= {"margin"} if not template and module not in (L.CircleLoss, L.GISTEmbedLoss, L.ProxyAnchorLoss) else set()
    by_call |= {"validate"} if module is L.ClipLoss else set()  # which has no indices
    by_call |= {"classes"} if module is L.CrossEntropyLoss else set()  # of the group
    by_call |= {"old_per_token_logps", "ref_per_token_logps", "importance_sampling_ratio"}
    tensors = {name for name, p in inspect.signature(definition).parameters.items() if p.default is inspect.Parameter.empty}
    options = set(theirs) - by_call - LEGACY - tensors - {"target"}  # which SigLIPLoss need not be given
    assert set(ours.option_names) == options
    for name in ours.option_names:
        if theirs[name] is not inspect.Parameter.empty:
            assert getattr(ours, name) == theirs[name], name


def test_a_bad_value_set_later_has_the_functions_error():
    criterion = L.SigmoidFocalLoss()
    criterion.gamma = -1.0
    with pytest.raises(ValueError, match="gamma must be finite and at least 0, got -1"):
        criterion(X, Y)
    criterion = L.CrossEntropyLoss()
    criterion.reduction = "avg"
    with pytest.raises(ValueError, match="reduction must be one of 'none', 'mean', 'sum', got 'avg'"):
        criterion(X, INDEX)
    criterion = L.HuberLoss()
    criterion.delta = "1"
    with pytest.raises(TypeError, match="delta must be a number, got str"):
        criterion(X, Y)


def test_a_tensor_given_to_a_number_is_a_buffer():
    criterion = L.SigmoidFocalLoss(reduction="mean")
    criterion.alpha = UNIT
    assert list(criterion.state_dict()) == ["alpha"]
    assert criterion.double().alpha.dtype == torch.float64
    assert torch.equal(criterion(X.double(), INDEX), L.sigmoid_focal_loss(X.double(), INDEX, alpha=UNIT.double(), reduction="mean"))


def test_a_number_given_to_a_buffer_ends_it():
    criterion = L.SigmoidFocalLoss(reduction="mean", alpha=UNIT)
    criterion.alpha = 0.5
    assert not criterion.state_dict()
    assert torch.equal(criterion(X, INDEX), L.sigmoid_focal_loss(X, INDEX, alpha=0.5, reduction="mean"))


def test_none_given_to_a_buffer_ends_it_until_a_tensor_is_given_again():
    criterion = L.CrossEntropyLoss(weight=UNIT)
    criterion.weight = None
    assert not criterion.state_dict()
    assert torch.equal(criterion(X, INDEX), L.cross_entropy(X, INDEX))
    criterion.load_state_dict({})
    criterion.weight = 2 * UNIT
    criterion.load_state_dict({"weight": UNIT})
    assert torch.equal(criterion.weight, UNIT)


def test_a_parameter_stays_one_and_is_trained():
    criterion = L.BCEWithLogitsLoss(weight=UNIT)
    criterion.weight = torch.nn.Parameter(UNIT.clone())
    assert [name for name, _ in criterion.named_parameters()] == ["weight"]
    criterion(X, Y).backward()
    wanted = torch.nn.functional.binary_cross_entropy_with_logits(X, Y, reduction="none").sum(0) / X.numel()
    torch.testing.assert_close(criterion.weight.grad, wanted)


def test_changed_attributes_survive_copies():
    criterion = L.CrossEntropyLoss(label_smoothing=0.1, z_loss=0.01)
    criterion.label_smoothing, criterion.weight, criterion.ignore_index = 0.25, UNIT, 1
    wanted = L.cross_entropy(X, INDEX, UNIT, ignore_index=1, label_smoothing=0.25, z_loss=0.01)
    for copied in (copy.deepcopy(criterion), pickle.loads(pickle.dumps(criterion)), copy.copy(criterion)):
        assert torch.equal(copied(X, INDEX), wanted)
        assert list(copied.state_dict()) == ["weight"]
        assert repr(copied) == repr(criterion)
    copied.label_smoothing = 0.0
    assert criterion.label_smoothing == 0.25


def test_a_compiled_module_reads_a_changed_attribute():
    criterion = L.HuberLoss(delta=0.3)
    compiled = torch.compile(criterion, fullgraph=True, backend="aot_eager")
    for delta in (0.3, 1.5):
        criterion.delta = delta
        x = X.clone().requires_grad_()
        value = compiled(x, Y)
        (g,) = torch.autograd.grad(value, x)
        x = X.clone().requires_grad_()
        expected = torch.nn.functional.huber_loss(x, Y, delta=delta)
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(g, torch.autograd.grad(expected, x)[0])
    criterion = L.CrossEntropyLoss()
    compiled = torch.compile(criterion, fullgraph=True, backend="aot_eager")
    for weight in (None, UNIT, 2 * UNIT.square()):
        criterion.weight = weight
        torch.testing.assert_close(compiled(X, INDEX), torch.nn.functional.cross_entropy(X, INDEX, weight))


def test_an_attribute_that_is_no_option_is_plain_python():
    class Scheduled(L.HuberLoss):
        steps: int = 0

        def forward(self, input, target, **per_call):
            self.steps += 1
            self.delta = 1.0 / self.steps
            return super().forward(input, target, **per_call)

    criterion = Scheduled()
    criterion.delt = 3.0
    assert criterion.delt == 3.0
    assert torch.equal(criterion(X, Y), L.huber_loss(X, Y))
    assert torch.equal(criterion(X, Y), L.huber_loss(X, Y, delta=0.5))


def test_as_torchs_modules_do():
    for ours, theirs, changed in (
        (L.L1Loss(), torch.nn.L1Loss(), {"reduction": "sum"}),
        (L.HuberLoss(), torch.nn.HuberLoss(), {"delta": 0.3}),
        (L.BCEWithLogitsLoss(), torch.nn.BCEWithLogitsLoss(), {"pos_weight": UNIT, "weight": UNIT.square()}),
    ):
        for name, value in changed.items():
            setattr(ours, name, value)
            setattr(theirs, name, value)
        torch.testing.assert_close(ours(X, Y), theirs(X, Y))
