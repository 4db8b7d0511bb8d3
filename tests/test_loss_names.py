"""The tables of docs/use_with/loss_names.md: every public loss of a library is in its table, and what it calls the same is the same."""

import importlib.metadata

import loss_names
import pytest
import torch

import lossforge.losses

LIBRARIES = loss_names.libraries()


def test_ours_are_public():
    rows = [row for library in LIBRARIES.values() for row in library["rows"]]
    assert sum("same" in row for row in rows) > 80
    assert {row["ours"] for row in rows if "ours" in row} <= {*lossforge.losses.__all__}
    assert all(len({"same", "differs", "absent"} & {*row}) == 1 and ("ours" in row) == ("differs" in row) for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_table_names_every_loss_and_compares_as_it_says(name):
    library = LIBRARIES[name]
    pytest.importorskip(library["modules"][0], reason=f"needs pip install {library['title']}")
    if importlib.metadata.version(library["title"]) == library["version"]:
        listed = [each for row in library["rows"] for each in loss_names.names(row)] + library.get("utilities", [])
        assert sorted(loss_names.public(library)) == sorted(listed)
    for row in library["rows"]:
        if "same" in row:
            dtype = getattr(torch, row.get("dtype", "float64"))
            assert loss_names.difference(library, row) < loss_names.LARGEST[dtype], row
