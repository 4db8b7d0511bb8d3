"""The pictures of the way of a call and of an update are those of today's code."""

import subprocess
import sys

from pages import ROOT

sys.path.append(str(ROOT / "tools"))
import way
from way import Call, Stop


def test_the_page_and_its_pictures_are_current():
    done = subprocess.run([sys.executable, ROOT / "tools" / "way.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def losses(name, *calls, file="definitions/binary.py"):
    return Call(f"packages/losses/src/lossforge/losses/{file}", name, list(calls))


def test_a_stop_is_entered_from_another_file_or_leads_into_one():
    led = losses("led", losses("check", file="checks.py"), losses("inner", losses("compute", file="run.py")))
    stops = way.stops_of(Call("", "", [losses("call", losses("alone"), led)]))
    assert [(stop.names[0], depth) for stop, depth in way.flat(stops)] == [("call", 0), ("led", 1), ("inner", 2), ("compute", 3)]


def test_a_function_that_is_called_twice_is_one_stop_with_all_that_it_calls():
    calls = [losses("each", losses(name, file=f"{name}.py")) for name in ("first", "second")]
    (stop,) = way.stops_of(Call("", "", calls))
    assert stop.names == ["each"]
    assert [below.names for below in stop.stops] == [["first"], ["second"]]


def test_a_call_outside_of_the_layers_is_not_recorded():
    with way.traced() as call:
        assert way.wrapped(["one", "two"], 4) == ["one,", "two"]  # of a file that is in no layer
    assert call.calls == []


def test_long_names_are_broken_and_escaped():
    picture = way.drawing("a < b", [Stop("experiments/lab/__init__.py", ["train" * 9, "evaluate" * 5])])
    assert "<title>a &lt; b</title>" in picture
    assert picture.count('font-weight="bold" font-size="11"') == 2
