"""trainer.profile: a trace of a few updates that Perfetto reads, beside a run that is what it would have been without."""

import gzip
import json

import pytest
import torch
from words import ALONE, TINY

import train

WORDS = [*TINY, "loss.implementation=torch", *ALONE]


def run(place, *words):
    assert train.main([*WORDS, *words, f"trainer.runs={place}"]) == 0
    (folder,) = place.iterdir()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open(encoding="utf-8")]
    return folder, records


def trace(folder):
    with gzip.open(folder / "profile" / "trace.json.gz", "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def test_the_last_updates_of_the_warm_up_are_traced(tmp_path):
    folder, records = run(tmp_path, "trainer.max_updates=12", "trainer.profile=true", "data.augment=false")
    events = trace(folder)
    steps = [event["name"] for event in events if event.get("name", "").startswith("ProfilerStep#")]
    assert sorted(set(steps)) == ["ProfilerStep#7", "ProfilerStep#8", "ProfilerStep#9"]
    # an update of this model is a forward and a backward, and each of its sixteen convolutions has its own event in both
    convolutions = [event for event in events if event.get("name") == "aten::convolution_backward"]
    assert len(convolutions) == 3 * sum(isinstance(module, torch.nn.Conv2d) for module in model().modules())
    assert any(event.get("name") == "[memory]" for event in events)
    assert "aten::convolution_backward" in (folder / "profile" / "operators.txt").read_text(encoding="utf-8")
    sent = [record["path"] for record in records if record["kind"] == "artifact" and record["folder"] == "profile"]
    assert sent == ["profile/trace.json.gz", "profile/operators.txt"]


def model():
    import timm

    return timm.create_model("test_resnet", in_chans=1, num_classes=10)


@pytest.mark.parametrize("updates", [3, 8])
def test_a_short_run_has_what_there_is(tmp_path, updates):
    """Of 3 updates none is traced, the warm-up's last are 8 to 10; of 8 updates one, and what came after it."""
    folder, records = run(tmp_path, f"trainer.max_updates={updates}", "trainer.profile=true")
    assert records[-1]["status"] == "FINISHED"
    assert (folder / "profile").exists() == (updates == 8)
    if updates == 8:
        assert {event["name"] for event in trace(folder) if event.get("name", "").startswith("ProfilerStep#")} == {
            "ProfilerStep#7",
            "ProfilerStep#8",
        }


def test_a_profile_changes_nothing_of_what_is_learnt(tmp_path):
    weights = []
    for words in (["trainer.profile=true"], []):
        folder, _ = run(tmp_path / str(len(words)), "trainer.max_updates=12", *words)
        weights.append(torch.load(folder / "checkpoints" / "last.pt", weights_only=True)["model"])
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())
