"""A user's own torch.utils.data.Dataset."""

import json
from collections.abc import Mapping
from typing import Any

from lab.config.schema import CustomDataConfig
from lab.data.spec import DataSpec


def places(data: Mapping[str, Any]) -> dict[str, set[str]]:
    return {"train": {json.dumps([data.get("target"), data.get("args")], sort_keys=True, default=str)}}


SPECS = (
    DataSpec(
        name="custom",
        schema=CustomDataConfig,
        open="lab.data.sources.custom:custom_data",
        places=places,
        files=("target", "args"),
        source="target",
    ),
)
