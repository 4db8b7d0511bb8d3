"""Every loss and every formula of the library is registered, under one name."""

from lossforge.losses.formulas import FORMULAS
from lossforge.losses.registry import LOSSES


def test_registry_is_whole():
    own = {name for name in FORMULAS if ":" not in name}  # the others are of losses of one's own
    by_option = {
        "asymmetric_constant_powers",
        "log_iou",
        "siou_rising",
        "probiou_log",
        "cross_entropy_by_probability",
    }  # which options of other losses select, or losses outside of the registry take
    assert {loss.formula for loss in LOSSES.values()} == own - by_option
    for name, loss in LOSSES.items():
        assert loss.name == name
        assert loss.module.function is loss.function
        assert loss.function.__doc__
        assert loss.oracle() is not None or loss.paper or not loss.template.by_rows  # others' judges are in their own tests
