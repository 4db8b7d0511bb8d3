"""A user's own torch.utils.data.Dataset."""

from lab.config.schema import CustomDataConfig
from lab.data.spec import DataSpec

SPECS = (
    DataSpec(name="custom", schema=CustomDataConfig, open="lab.data.sources.custom:custom_data", files=("target", "args"), source="target"),
)
