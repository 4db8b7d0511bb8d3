"""The settings of a run as dataclasses: names, types, defaults, ranges."""

from dataclasses import Field, dataclass, field, fields, is_dataclass
from math import isfinite
from typing import Any

from lab.config.errors import UserError, unknown
from lab.config.fields import choice, number, setting, some
from lab.config.loss_schema import LOSSES, LossConfig


@dataclass
class TaskConfig:
    name: str = setting("classification", "the task")
    target: str | None = setting(None, "of task=custom: the lab.tasks.spec.TaskSpec, as module:name or path/to/file.py:name")


@dataclass
class ClassificationConfig(TaskConfig):
    calibration_bins: int = number(15, "bins of confidence in the calibration error", least=2, most=1000)
    metrics: dict[str, str] = some(dict, "own metrics of (probability, target), by name: module:name or path/to/file.py:name")


@dataclass
class ModelConfig:
    name: str = "???"
    pretrained: bool = False
    args: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return self.name


@dataclass
class ClassifierConfig(ModelConfig):
    drop_rate: float = number(0.0, least=0, below=1)
    drop_path_rate: float | None = number(None, least=0, below=1)


@dataclass
class CustomModelConfig(ClassifierConfig):
    """Called with num_classes, in_chans and img_size, those of them that it takes, and with args."""

    name: str = setting("custom", "a model of one's own")
    target: str = setting("???", "a callable that returns a torch.nn.Module, as module:name or path/to/file.py:name")

    @property
    def title(self) -> str:
        return self.target.rpartition(":")[2]


@dataclass
class DataConfig:
    name: str = "digits"
    batch_size: int = number(64, least=1)
    eval_batch_size: int = number(256, least=1)
    augment: bool = True


@dataclass
class ImagesConfig(DataConfig):
    """Images of one class each. class_balance: β of the class-balanced weights of training images, null for none."""

    image_size: int = number(32, least=8)
    mixup: float = number(0.0, least=0)
    cutmix: float = number(0.0, least=0)
    mix_probability: float = number(1.0, least=0, most=1)
    class_weight: dict[Any, float] = some(dict, least=0)
    class_group: dict[Any, int] = some(dict, least=0)
    class_balance: float | None = number(None, least=0, below=1)
    csv: str | None = None


@dataclass
class MemoryConfig(ImagesConfig):
    """Images held in memory, whose training part can be made harder, as corruption_seed has it.

    train_share: share of each class's images that stay.
    imbalance: how many times as many images the first class has as the last; counts fall exponentially in between.
    label_noise: share of the training labels that are replaced by another class.
    """

    train_share: float = number(1.0, above=0, most=1)
    imbalance: float = number(1.0, least=1)
    label_noise: float = number(0.0, least=0, below=1)
    corruption_seed: int = number(0, least=0)


@dataclass
class DigitsConfig(MemoryConfig):
    held_out: float = number(0.2, above=0, below=1)
    split_seed: int = number(0, least=0)


@dataclass
class DownloadedConfig(MemoryConfig):
    root: str | None = None
    download: bool = True


@dataclass
class FolderConfig(ImagesConfig):
    """check: how much of the images is looked at before the run starts; skip_corrupt leaves out those that cannot be used."""

    root: str | None = None
    train: str = "train"
    val: str = "val"
    workers: int | None = number(None, least=0)  # that read and prepare images; None: the share of the cores, up to 16
    color_jitter: float = number(0.4, least=0)
    auto_augment: str | None = None
    crop_scale: float = number(0.08, above=0, most=1)
    horizontal_flip: float = number(0.5, least=0, most=1)
    random_erase: float = number(0.0, least=0, most=1)
    check: str = choice("headers", "off", "headers", "pixels")
    skip_corrupt: bool = False


@dataclass
class BoxLossConfig:
    """auto is the detector's own: L1 of encoded boxes for RetinaNet, GIoU for FCOS."""

    name: str = setting("auto", "the loss of boxes")
    weight: float = number(1.0, "factor beside the classes' loss", least=0)


SCHEDULES = ("cosine", "tanh", "step", "multistep", "poly", "wsd", "rsqrt", "constant")


@dataclass
class ScheduleConfig:
    name: str = choice("cosine", *SCHEDULES, meaning="how the learning rate falls (timm's schedules)")
    warmup_epochs: float | None = number(None, "epochs in which it rises; null: a tenth of the run", least=0)
    warmup_lr: float = number(1e-5, "learning rate at the start of the warm-up", least=0)
    min_lr: float = number(0.0, "learning rate at the end of the schedule", least=0)
    decay_epochs: float | None = number(None, "epochs between two steps of step, and of the decay of wsd; null: timm's", above=0)
    decay_milestones: list[int] = some(lambda: [90, 180, 270], "epochs of the steps of multistep", least=1)
    decay_rate: float = number(0.1, "factor at each step of step and multistep; power of poly", above=0)


@dataclass
class OptimConfig:
    name: str = setting("adamw", "a timm optimiser (timm.optim.list_optimizers()), or custom")
    target: str | None = setting(None, "of name=custom: a torch.optim.Optimizer class, as module:name or path/to/file.py:name")
    lr: float = number(1e-3, "learning rate after the warm-up", above=0)
    weight_decay: float = number(0.05, "weight decay; biases and norms have none", least=0)
    momentum: float = number(0.9, "momentum of the optimisers that have one", least=0, below=1)
    layer_decay: float | None = number(None, "factor of the learning rate from layer to layer, towards the input", above=0, most=1)
    clip: float | None = number(None, "largest norm or value of gradients; null: not clipped", above=0)
    clip_mode: str = choice("norm", "norm", "value", "agc", meaning="what clip limits: the whole norm, each value, or adaptively")
    args: dict[str, Any] = some(dict, "further arguments of the optimiser")
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)


@dataclass
class TrainerConfig:
    epochs: int = number(8, least=1)
    max_updates: int | None = number(None, least=1)
    device: str = "auto"
    deterministic: bool = False
    tf32: bool = True
    amp: str = choice("off", "off", "bf16", "fp16")
    channels_last: bool = False
    compile: bool = False
    accumulate: int = number(1, least=1)
    parallel: str = choice("ddp", "ddp", "fsdp")
    sync_batchnorm: bool = False
    ema: float | None = number(None, above=0, below=1)
    ema_warmup: bool = True
    log_every: int = number(10, least=1)
    eval_every: int = number(1, least=1)
    save_every: int = number(1, least=1)
    save_updates: int | None = number(None, least=1)
    save_minutes: float | None = number(10.0, above=0)
    timing_warmup: int = number(10, least=0)
    max_nonfinite: int = number(10, least=1)
    runs: str | None = None
    callbacks: list[str] = some(list, "own code to call while it trains (lab.train.callbacks): module:name or file.py:name")


@dataclass
class TrackingConfig:
    enabled: bool = True
    uri: str | None = None
    experiment: str = "lossforge"
    tags: dict[str, str] = field(default_factory=dict)
    system_seconds: float = number(5.0, above=0)
    patience_seconds: float = number(60.0, least=0)


@dataclass
class TrainConfig:
    name: str | None = setting(None, "the run's name; null: loss-model-data")
    seed: int = number(0, "of weights, order, augmentation and dropout", least=0)
    resume: str | None = setting(None, "a run's folder or checkpoint to go on with; auto: the newest unfinished run of these settings")
    task: TaskConfig = field(default_factory=ClassificationConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LOSSES["ce"])
    box_loss: BoxLossConfig = field(default_factory=BoxLossConfig)
    data: DataConfig = field(default_factory=DigitsConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


@dataclass
class BenchConfig:
    """What is measured: names or globs, all where none is given."""

    name: str | None = setting(None, "the run's name; null: made of the filters")
    mode: str = choice("measure", "measure", "profile", meaning="profile: a trace, and every kernel's time, registers and spills, for ours")
    suite: list[str] = some(list, "names of suites, or globs")
    loss: list[str] = some(list, "names of losses, or globs")
    shape: list[str] = some(list, "names of shapes, or globs")
    dtype: list[str] = some(list, "names of dtypes, or globs")
    contenders: list[str] = some(list, "names of contenders, or globs")
    device: str = setting("auto", "where to measure: auto, cuda, cuda:N or cpu")
    milliseconds: float = number(80.0, "how long to repeat for each figure", above=0)
    seed: int = number(0, "of the samples", least=0)
    forward: bool = setting(True, "measure forward alone, too")
    graphs: bool = setting(True, "measure replays of CUDA graphs, too")
    out: str | None = setting(None, "a file to write the report to as well (lossforge.bench.compare reads two)")
    commit: str | None = setting(None, "the commit's name where the sources are no git checkout")
    runs: str | None = setting(None, "folder of runs; null: runs/")
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


def range_text(limits: Any) -> str:
    """Say a range in words, such as 'above 0, at most 1'."""
    words = {"above": "above", "least": "at least", "below": "below", "most": "at most"}
    return ", ".join(f"{word} {limits[key]:g}" for key, word in words.items() if limits.get(key) is not None)


def check(config: Any, path: str = "") -> None:
    """Raise UserError for the first value outside its range or its choices, or that is nan or infinite."""
    for item in fields(config):
        value = getattr(config, item.name)
        key = f"{path}{item.name}"
        if is_dataclass(value):
            check(value, f"{key}.")
        elif value is not None:
            _check_value(key, value, item)


def _check_value(key: str, value: Any, item: "Field[Any]") -> None:
    limits = item.metadata
    if (choices := limits.get("choices")) and value not in choices:
        raise unknown(f"{key}={value}", value, choices)
    for each in _numbers(value):
        if not isfinite(each) or not _inside(each, limits):
            wanted = f"{'' if isfinite(each) else 'finite '}numbers {range_text(limits)}".strip()
            raise UserError(f"{key}={value}: {each:g} is out of range; {key} takes {wanted}.")


def _numbers(value: Any) -> list[int | float]:
    """A number, or those of a list or a map, at any depth."""
    if isinstance(value, (dict, list)):
        return [number for each in (value.values() if isinstance(value, dict) else value) for number in _numbers(each)]
    return [value] if isinstance(value, (int, float)) else []


def _inside(value: float, limits: Any) -> bool:
    above, least, below, most = (limits.get(key) for key in ("above", "least", "below", "most"))
    return (
        (above is None or value > above)
        and (least is None or value >= least)
        and (below is None or value < below)
        and (most is None or value <= most)
    )
