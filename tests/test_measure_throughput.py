"""The measurement of throughput beside timm's parts runs, and times both on the disk's photos and on batches that are read once."""

import json

import measure
import pytest


@pytest.mark.slow
def test_both_are_timed(tmp_path):
    path = tmp_path / "throughput.json"
    path.write_text('{"resnet50": {"kept": true}}')
    assert measure.main(["throughput", "--out", str(path), "--commit", "abc1234", "--small", "--parts", "vit_small"]) == 0
    found = json.loads(path.read_text())
    assert found["resnet50"] == {"kept": True}
    assert found["vit_small"]["commit"] == "abc1234"
    assert [(row["by"], row["data"]) for row in found["vit_small"]["rows"]] == [
        (by, data) for by in ("lossforge", "timm") for data in ("disk", "loop")
    ]
    assert all(row["images_per_second"] > 0 for row in found["vit_small"]["rows"])
