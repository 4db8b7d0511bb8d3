"""WebDataset shards on disk."""

from collections.abc import Mapping
from typing import Any

from lab.base.errors import UserError
from lab.base.paths import absolute
from lab.config.schema import ShardsConfig
from lab.data.spec import DataSpec


def places(data: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the real paths of each part's shards; the pattern itself if they are not there any more."""
    from lab.data.sources.shards import expanded  # it loads torch, which settings do not need

    def shards(pattern: str) -> set[str]:
        try:
            return {str(path.resolve()) for path in expanded("data.shards", pattern)}
        except UserError:
            return {str(absolute(pattern, ""))}

    return {part: shards(str(pattern)) for part, pattern in SPECS[0].named(data).items()}


SPECS = (
    DataSpec(
        name="webdataset",
        schema=ShardsConfig,
        open="lab.data.sources.shards:shards_data",
        parts=("shards", "val", "test"),
        places=places,
        files=("image", "label"),
        source="shards",
    ),
)
