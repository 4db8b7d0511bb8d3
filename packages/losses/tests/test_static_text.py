"""What an editor reads: the stub of every public function and module has each argument with its type and default, as it is at run time."""

import ast
import copy
import functools
import inspect
import pickle
import pydoc
import typing
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lossforge.losses as losses
from lossforge.losses import functional, modules
from lossforge.losses.base.declare import DECLARED

FUNCTIONS = [*DECLARED, "sequence_logps", "class_balanced_weight"]
SHORT = {"check", "fuse_linear", "elementwise", "rowwise", "boxes", "backend", "plain_torch"}
SHORT |= {"box_iou", "generalized_box_iou", "distance_box_iou", "complete_box_iou", "task_aligned_assign"}
SHORT |= {"rotated_box_iou", "probabilistic_box_iou", "max_iou_assign", "atss_assign", "simota_assign", "rtmdet_assign"}
SHORT |= {"matching_cost", "hungarian_assign", "hungarian_match", "mask_matching_cost", "seesaw_loss", "rotated_giou_loss"}
SHORT |= {"point_mask_loss", "prototype_mask_loss", "sample_uncertain_points"}
SHORT |= {"boundary_loss", "distance_transform", "generalized_dice_loss", "hausdorff_loss", "mcc_loss", "signed_distance_map", "silog_loss"}
SHORT |= {"mean_center", "sinkhorn_center", "grad_cache_backward", "draft_decay_weights", "draft_confidence_weights", "mtp_targets"}

X = torch.zeros(2, 3)


@functools.cache
def stubs(module):
    """The functions and classes of a module's stub by name: several of a name are overloads."""
    return members(ast.parse(Path(module.__file__).with_suffix(".pyi").read_text(encoding="utf-8")))


def members(node):
    found = {}
    for each in node.body:
        if isinstance(each, (ast.FunctionDef, ast.ClassDef)):
            found.setdefault(each.name, []).append(each)
    return found


def defaults_of(node):
    """The parameters of a function's source: whether each has a type, and its default as it is written."""
    taken = node.args
    named = dict(zip([a.arg for a in taken.args][::-1], taken.defaults[::-1], strict=False))
    named |= {a.arg: default for a, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if default}
    return {a.arg: (a.annotation is not None, ast.unparse(named[a.arg]) if a.arg in named else None) for a in taken.args + taken.kwonlyargs}


def defaults(signature):
    return {name: p.default for name, p in signature.parameters.items() if p.default is not p.empty}


def check(name, nodes, signature, told):
    """Of overloads, the last has every argument as it is; the others have a default or a type for what they return."""
    *overloads, node = nodes
    for each in overloads:
        written = {p: default for p, (_, default) in defaults_of(each).items() if default is not None}
        assert {p: ast.literal_eval(default) for p, default in written.items()}.items() <= defaults(signature).items()
        assert len(written) >= len(defaults(signature)) - 1
    found = defaults_of(node)
    found.pop("self", None)
    assert list(found) == list(signature.parameters)
    for each, parameter in signature.parameters.items():
        typed, default = found[each]
        assert typed, f"{name}: {each} has no type"
        written = inspect.Parameter.empty if default is None else ast.literal_eval(default)
        assert written == parameter.default, each
        assert f"\n    {each}: " in told, f"{name}: {each} has no meaning"
    assert not [p for p in signature.parameters.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


@pytest.mark.parametrize("name", DECLARED)
def test_a_functions_stub_has_its_arguments(name):
    function = getattr(losses, name)
    check(name, stubs(functional)[name], inspect.signature(function), inspect.getdoc(function))
    shown = pydoc.plain(pydoc.render_doc(function))
    assert all(each in shown for each in inspect.signature(function).parameters)
    assert set(typing.get_type_hints(function)) == {*inspect.signature(function).parameters, "return"}


@pytest.mark.parametrize("name", modules.__all__)
def test_a_modules_stub_has_its_arguments(name):
    module = getattr(modules, name)
    (node,) = stubs(modules)[name]
    check(name, members(node)["__init__"], inspect.signature(module), inspect.getdoc(module))
    kept = {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}
    of_base = {"empty"} & inspect.signature(module).parameters.keys()
    assert kept | of_base == set(module().option_names)
    forward = inspect.signature(module.forward)
    assert forward.return_annotation is Tensor or Tensor in typing.get_args(forward.return_annotation)
    assert all(p.annotation is not p.empty for p in [*forward.parameters.values()][1:])
    taken = members(node)["forward"][0].args
    named = [*taken.args, *([taken.vararg] if taken.vararg else ()), taken.kwarg]
    assert [each.arg for each in named] == list(forward.parameters)
    assert pydoc.plain(pydoc.render_doc(module)).startswith("Python Library Documentation: class")


@pytest.mark.parametrize("name", [*DECLARED, *modules.__all__])
def test_what_is_made_at_import_is_found_by_its_name(name):
    """So it is pickled and copied, and named in a traceback, as if it were written there."""
    made = getattr(losses, name)
    assert pickle.loads(pickle.dumps(made)) is copy.deepcopy(made) is made
    assert name in dir(losses)
    module = functional if name in DECLARED else modules
    assert (made.__module__, made.__qualname__) == (module.__name__, name)
    assert (made if name in DECLARED else made.__init__).__code__.co_name in (name, "__init__")


def test_no_two_names_share_code():
    """torch.compile stops at eight graphs of one code object. A class that inherits from a module has its own as well."""
    inherited = type("Inherited", (losses.L1Loss,), {})
    made = [*(getattr(losses, name) for name in losses.__all__ if inspect.isfunction(getattr(losses, name)))]
    made += [getattr(modules, name).forward for name in modules.__all__] + [inherited.forward]
    codes = [function.__code__ for function in made]
    assert len(codes) > 200
    assert len({*codes}) == len(codes)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: losses.cross_entropy(X), r"^cross_entropy\(\) missing 1 required positional argument: 'target'"),
        (lambda: losses.koleo_loss(), r"^koleo_loss\(\) missing 1 required positional argument: 'input'"),
        (lambda: losses.huber_loss(X, X, "mean", 1.0, None, X), r"^huber_loss\(\) takes from 2 to 5 positional arguments but 6 were given"),
        (lambda: losses.cross_entropy(X, X, input=X), r"^cross_entropy\(\) got multiple values for argument 'input'"),
        (
            lambda: losses.cross_entropy(X, X, smoothing=1),
            r"^cross_entropy\(\) got an unexpected keyword .* It takes input, target",
        ),
        (lambda: losses.HuberLoss("mean", 1.0, 2), r"^HuberLoss\(\) takes reduction, delta by position, the rest by name, got 3$"),
        (lambda: losses.KoLeoLoss(1e-8, eps=1e-8), r"^KoLeoLoss\(\) got eps twice, by position and by name$"),
        (lambda: losses.HuberLoss(delt=1.0), r"^HuberLoss\(\) got an unexpected keyword argument 'delt'; did you mean 'delta'\?"),
        (lambda: losses.HuberLoss()(X, X, X), r"^HuberLoss\(\) takes input, target by position, the rest by name, got 3$"),
        (lambda: losses.HuberLoss()(X), r"^huber_loss\(\) missing 1 required positional argument: 'target'"),
        (lambda: losses.HuberLoss()(X, X, input=X), r"^huber_loss\(\) got multiple values for argument 'input'"),
    ],
)
def test_a_wrong_call_is_answered_by_name(call, said):
    with pytest.raises(TypeError, match=said):
        call()


def test_a_module_takes_its_tensors_by_name_whatever_its_function_calls_them():
    """torchvision calls them inputs and targets."""
    x, target = torch.randn(3, 4), torch.rand(3, 4)
    module = losses.SigmoidFocalLoss(reduction="sum")
    assert torch.equal(module(target=target, input=x), losses.sigmoid_focal_loss(inputs=x, targets=target, reduction="sum"))


def test_every_public_function_is_walked():
    public = {name for name in losses.__all__ if inspect.isfunction(getattr(losses, name))}
    assert public == set(FUNCTIONS) | SHORT


@pytest.mark.parametrize("name", DECLARED)
def test_a_definition_has_the_same_types(name):
    """The public function says each option, the definition may say `**options`."""
    short, whole = (inspect.signature(each).parameters for each in (DECLARED[name].definition, getattr(functional, name)))
    options = [p for p in short.values() if p.kind is p.VAR_KEYWORD]
    of_options = typing.get_type_hints(typing.get_args(options[0].annotation)[0]) if options else {}
    assert list(whole) == [*(each for each in short if short[each] not in options), *of_options]
    for each, hint in of_options.items():
        assert whole[each].annotation == hint, each
