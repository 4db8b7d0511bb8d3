"""What an editor reads: the source of every public function and module has each argument with its type, default and meaning."""

import ast
import functools
import inspect
import pydoc
import typing
from pathlib import Path

import pytest
from torch import Tensor

import lossforge.losses as losses
from lossforge.losses import functional, modules
from lossforge.losses.base.declare import DECLARED

FUNCTIONS = [*DECLARED, "sequence_logps", "class_balanced_weight"]
SHORT = {"check", "fuse_linear", "elementwise", "rowwise", "boxes", "backend", "plain_torch"}
SHORT |= {"box_iou", "generalized_box_iou", "distance_box_iou", "complete_box_iou", "task_aligned_assign"}
SHORT |= {"rotated_box_iou", "probabilistic_box_iou", "max_iou_assign", "atss_assign", "simota_assign", "rtmdet_assign"}
SHORT |= {"matching_cost", "hungarian_assign", "hungarian_match", "mask_matching_cost", "seesaw_loss"}
SHORT |= {"point_mask_loss", "prototype_mask_loss", "sample_uncertain_points"}
SHORT |= {"boundary_loss", "distance_transform", "generalized_dice_loss", "hausdorff_loss", "mcc_loss", "signed_distance_map", "silog_loss"}
SHORT |= {"sinkhorn_center", "grad_cache_backward"}


def defined(source):
    """The function or class of a source, without overloads."""
    return ast.parse(inspect.cleandoc("\n" + source)).body[-1]


@functools.cache
def classes(file):
    """The classes of a file by name, parsed once: inspect.getsource parses it anew for each."""
    return {node.name: node for node in ast.parse(Path(file).read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)}


def defaults_of(node):
    """The parameters of a function's source: whether each has a type, and its default as it is written."""
    taken = node.args
    named = dict(zip([a.arg for a in taken.args][::-1], taken.defaults[::-1], strict=False))
    named |= {a.arg: default for a, default in zip(taken.kwonlyargs, taken.kw_defaults, strict=True) if default}
    return {a.arg: (a.annotation is not None, ast.unparse(named[a.arg]) if a.arg in named else None) for a in taken.args + taken.kwonlyargs}


def check(name, node, signature, told):
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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_functions_source_has_its_arguments(name):
    function = getattr(losses, name)
    node = defined(inspect.getsource(function))
    assert node.name == name
    assert inspect.cleandoc(ast.get_docstring(node)) == inspect.getdoc(function)
    check(name, node, inspect.signature(function), inspect.getdoc(function))
    shown = pydoc.plain(pydoc.render_doc(function))
    assert all(each in shown for each in inspect.signature(function).parameters)


@pytest.mark.parametrize("name", modules.__all__)
def test_a_modules_source_has_its_arguments(name):
    module = getattr(modules, name)
    node = classes(inspect.getsourcefile(module))[name]
    members = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}  # of overloads the last
    assert inspect.cleandoc(ast.get_docstring(node)) == inspect.getdoc(module)
    check(name, members["__init__"], inspect.signature(module), inspect.getdoc(module))
    assert defined(inspect.getsource(module.__init__)).name == "__init__"
    kept = {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}
    of_base = {"empty"} & inspect.signature(module).parameters.keys()
    assert kept | of_base == set(module().option_names)
    forward = inspect.signature(module.forward)
    assert forward.return_annotation is Tensor or forward.return_annotation is modules.Result
    assert all(p.annotation is not p.empty for p in [*forward.parameters.values()][1:])
    assert pydoc.plain(pydoc.render_doc(module)).startswith("Python Library Documentation: class")


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
