"""Every loss and every formula of the library is registered, under one name."""

import inspect

import pytest
import torch

from lossforge.losses.formulas import FORMULAS
from lossforge.losses.registry import LOSSES
from lossforge.losses.testing import samples


def test_registry_is_whole():
    own = {name for name in FORMULAS if ":" not in name}  # the others are of losses of one's own
    by_option = {
        "asymmetric_constant_powers",
        "log_iou",
        "siou_rising",
        "probiou_log",
        "cross_entropy_by_probability",
        *("draft_log_tv", "draft_tv", "draft_kl", "draft_ce", "draft_overlap"),
        "softmax_focal_soft",
        "poly_ce_soft",
    }  # which options of other losses select, or losses outside of the registry take
    assert {loss.formula for loss in LOSSES.values()} == own - by_option
    for name, loss in LOSSES.items():
        assert loss.name == name
        assert loss.module.function is loss.function
        assert loss.function.__doc__
        assert loss.oracle() is not None or loss.paper or not loss.template.by_rows  # others' judges are in their own tests


@pytest.mark.parametrize("loss", LOSSES.values(), ids=lambda loss: loss.name)
def test_an_option_that_is_left_out_has_the_default_of_the_signature(loss):
    """A definition has the defaults of `**options` a second time, where it or its template reads them."""
    defaults = {p.name: p.default for p in inspect.signature(loss.function).parameters.values() if p.kind is p.KEYWORD_ONLY}
    for sample in samples(loss, "cpu"):
        given = {"reduction": "sum", **sample.kwargs}
        got, expected = (loss.reference(sample.x, sample.target, **options) for options in ({**defaults, **given}, given))
        assert torch.equal(got.nan_to_num(), expected.nan_to_num()), sample.name
