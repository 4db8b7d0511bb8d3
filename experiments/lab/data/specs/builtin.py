"""Sets that are held in memory: handwritten digits, MNIST and CIFAR."""

from lab.config.schema import DigitsConfig, DownloadedConfig
from lab.data.spec import DataSpec

SPECS = (
    DataSpec(name="digits", schema=DigitsConfig, open="lab.data.load:digits_data"),
    *(
        DataSpec(name=name, schema=DownloadedConfig, open="lab.data.load:downloaded_data", files=("root",), source="root")
        for name in ("cifar10", "cifar100", "mnist")
    ),
)
