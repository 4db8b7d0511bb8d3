"""Files for people are whole or as they were, however their process ends while it writes them."""

import tempfile
from pathlib import Path

import pytest


def test_a_linked_file_keeps_what_it_held_when_the_first_name_is_written_again(tmp_path):
    from lab.base.files import link_whole, write_text

    first, second = tmp_path / "run" / "best.pt", tmp_path / "store" / "deep" / "best.pt"
    write_text(first, "the first epoch's")
    assert link_whole(first, second)
    assert first.samefile(second)
    write_text(first, "the second epoch's")
    assert second.read_text() == "the first epoch's"
    assert link_whole(first, second)
    assert link_whole(first, second), "a second time changes nothing"
    assert (second.read_text(), first.samefile(second)) == ("the second epoch's", True)
    assert [path.name for path in second.parent.iterdir()] == ["best.pt"]


def test_no_file_is_linked_across_file_systems(tmp_path):
    from lab.base.files import link_whole

    other = Path("/dev/shm")
    if not other.is_dir() or other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is one file system")
    (tmp_path / "best.pt").write_text("weights")
    with tempfile.TemporaryDirectory(dir=other) as folder:
        assert not link_whole(tmp_path / "best.pt", Path(folder) / "best.pt")
        assert not any(Path(folder).iterdir())
