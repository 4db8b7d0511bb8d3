"""The settings of a run as dataclasses: names, types, defaults, ranges."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from math import isfinite
from typing import Any

from lab.base.errors import UserError, unknown
from lab.config.fields import choice, number, setting, some
from lab.config.loss_schema import LOSSES, LossConfig


@dataclass
class TaskConfig:
    name: str = setting("classification", "the task")
    target: str | None = setting(None, "for task=custom: the lab.tasks.spec.TaskSpec, as module:name or path/to/file.py:name", code=True)


@dataclass
class ClassificationConfig(TaskConfig):
    calibration_bins: int = number(15, "bins of confidence in the calibration error", least=2, most=1000)
    metrics: dict[str, str] = some(dict, "custom metrics of (probability, target), by name: module:name or path/to/file.py:name", code=True)


@dataclass
class ModelConfig:
    name: str = setting("???", "the timm model's name")
    pretrained: bool = setting(False, "begin with timm's weights, which are downloaded")
    weights: str | None = setting(None, "begin with the weights of a checkpoint: .pt or .safetensors")
    freeze: list[str] = some(list, "parts that are not trained: names, globs, or backbone (all except the classifier)")
    checkpoint_activations: bool = setting(False, "compute blocks again in backward instead of keeping their activations")
    args: dict[str, Any] = some(dict, "more arguments of the timm or custom model, by name")

    @property
    def title(self) -> str:
        return self.name


@dataclass
class ClassifierConfig(ModelConfig):
    drop_rate: float = number(0.0, "share of features that dropout sets to 0", least=0, below=1)
    drop_path_rate: float | None = number(None, "share of blocks that stochastic depth skips", least=0, below=1)


@dataclass
class CustomModelConfig(ClassifierConfig):
    """A custom model, called with `args` and those of num_classes, in_chans and img_size that it takes."""

    name: str = setting("custom", "a custom model")
    target: str = setting("???", "a callable that returns a torch.nn.Module, as module:name or path/to/file.py:name", code=True)

    @property
    def title(self) -> str:
        return self.target.rpartition(":")[2]


@dataclass
class DataConfig:
    name: str = setting("digits", "the data set")
    batch_size: int = number(64, "training samples a batch, on each process", least=1)
    eval_batch_size: int = number(256, "samples a batch where the model is evaluated", least=1)
    augment: bool = setting(True, "change training images at random")


AUTO = "auto"
"""The value of data.shortest and of a folder of masks' data.image_size until the data is opened, which then sets the number."""
FITTED = ("shortest", "image_size")


def as_opened(tree: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's settings, where what is `auto` until the data is opened has the values of `given`, the settings of an opened run."""
    known = given["data"]
    return tree | {
        "data": {key: known.get(key, value) if value == AUTO and key in FITTED else value for key, value in tree["data"].items()}
    }


@dataclass
class LabelSetConfig(DataConfig):
    """Images with several labels each, such as the classes of their boxes."""


EXIF = ("shown", "shown", "stored")
"""The default of data.exif, and its choices."""
WHERE_EXIF = "which picture boxes and masks belong to where EXIF's turn keeps its size: as shown, or as stored"


@dataclass
class SplitConfig:
    """Settings of the held-out images of a data set without a split of its own: a random share of each class."""

    held_out: float = number(0.2, "share of the images held out, by which the best epoch is chosen", above=0, below=1)
    split_seed: int = number(0, "seed of which images are held out", least=0)


@dataclass
class FoldConfig(SplitConfig):
    folds: int = number(5, "number of parts that data.fold divides the images into", least=2)
    fold: int | None = number(None, "the part held out instead of data.held_out, from 0", least=0)


SAMPLERS = ("balanced", "weighted")


@dataclass
class ImagesConfig(DataConfig):
    """Images of one class each."""

    image_size: int = number(32, "pixels a side that the model sees", least=8, most=8192)
    mixup: float = number(0.0, "α of mixup, which blends pairs of images; 0: none", least=0)
    cutmix: float = number(0.0, "α of cutmix, which pastes a box of another image; 0: none", least=0)
    mix_probability: float = number(1.0, "share of the batches that mixup or cutmix changes", least=0, most=1)
    class_weight: dict[Any, float] = some(dict, "weight of a class's images, by its name or number", least=0)
    class_group: dict[Any, int] = some(dict, "group of a class's images, by its name or number", least=0)
    class_balance: float | None = number(None, "β of the class-balanced weights of training images", least=0, below=1)
    csv: str | None = setting(None, "file with a column path or index, and weight, group or both", path="always")
    sampler: str | None = setting(
        None, "draw training images balanced (by class), weighted, or by file.py:name; null: each once", code=True, words=SAMPLERS
    )


@dataclass
class MemoryConfig(ImagesConfig):
    """Images held in memory; the training images can be made harder to learn."""

    only_classes: list[Any] = some(list, "classes that are kept, by name or number; empty: all")
    train_share: float = number(1.0, "share of each class's training images that are kept", above=0, most=1)
    imbalance: float = number(1.0, "times as many images of the first class as of the last", least=1)
    label_noise: float = number(0.0, "share of the training labels that become another class", least=0, below=1)
    corruption_seed: int = number(0, "seed of which images are kept and which labels change", least=0)


@dataclass
class DigitsConfig(FoldConfig, MemoryConfig):
    test: float | None = number(None, "share of test images, scored once at the end", above=0, below=1)


@dataclass
class DownloadedConfig(FoldConfig, MemoryConfig):
    """Data sets with their own test images; these are held out, unless `test` or `fold` hold out training images."""

    held_out: float = number(0.1, "share of the training images held out with data.test=true", above=0, below=1)
    test: bool = setting(False, "score the set's own test images once at the end, and hold out training images")
    root: str | None = setting(None, "folder with the files; null: data/ of the repository", path="always")
    download: bool = setting(True, "download missing files")


@dataclass
class PhotosConfig(FoldConfig, ImagesConfig):
    """Images of any size, read by worker processes and resized as the model expects."""

    # ImagesConfig declares an int, which it is once `fill_from_model` has set it: hence the ignore
    image_size: int | None = number(None, "pixels a side that the model sees; null: the model's own", least=8, most=8192)  # type: ignore[assignment]
    crop_pct: float | None = number(None, "share of a held-out image's side that is seen; null: the model's", above=0, most=1)
    crop_mode: str | None = choice(None, "center", "border", "squash", meaning="how a held-out image is made square; null: the model's")
    interpolation: str | None = choice(None, "bilinear", "bicubic", "nearest", "lanczos", meaning="for resizing; null: the model's own")
    workers: int | None = number(None, "processes that read images; null: this process's share of the cores, up to 16", least=0)
    color_jitter: float = number(0.4, "range of random brightness, contrast and saturation", least=0)
    auto_augment: str | None = setting(None, "timm's policy of augmentation, such as rand-m9-mstd0.5")
    crop_scale: float = number(0.08, "smallest share of a training image that a random crop keeps", above=0, most=1)
    horizontal_flip: float = number(0.5, "share of the training images that are mirrored", least=0, most=1)
    random_erase: float = number(0.0, "share of the training images with a box erased", least=0, most=1)
    transform: str | None = setting(
        None, "your own transform of training images, as module:name or path/to/file.py:name; null: ours", code=True
    )
    val_transform: str | None = setting(None, "the same of held-out images, as module:name or file.py:name; null: the model's", code=True)
    channels: int | None = number(
        None, "read images as they are: so many channels of 8 or 16 bits or floats; null: as RGB of 8 bits", least=1, most=12
    )
    normalization: str | None = choice(
        None, "model", "measured", meaning="mean and deviation of pixels: the model's, or the training images'; null: model for RGB"
    )


@dataclass
class FolderConfig(PhotosConfig):
    """Images in one folder a class."""

    root: str | None = setting(None, "folder of the images; null: data/ of the repository", path="always")
    train: str = setting("train", "folder in data.root with the training images")
    val: str | None = setting(None, "folder with the held-out images; null: val, valid or validation if it is there")
    test: str | None = setting(None, "folder with images scored once at the end")
    classes: list[str] | None = setting(None, "names of the classes in their order; null: the folders in data.train, sorted", distinct=True)
    check: str = choice("headers", "off", "headers", "pixels", meaning="how much of each image is checked before the run")
    skip_corrupt: bool = setting(False, "leave out the images that cannot be read")


@dataclass
class TableConfig(PhotosConfig):
    """Images and their labels in a table, a row an image.

    A label is one class, several (a list in a cell, or a column of yes and no for each class; task=multilabel), or numbers (a column for
    each; task=regression). Without a column `split` some images are held out at random.
    """

    name: str = setting("table", "the data set")
    file: str = setting("???", "the table: .csv, .tsv or .parquet", path="always")
    root: str | None = setting(None, "folder that the images' paths begin in; null: the table's folder", path="always")
    image: str = setting("path", "column of the images' paths")
    label: Any = setting("label", "column of the label; [a,b]: one for each class, where -1 or nothing masks a label, or number")
    delimiter: str | None = setting(None, "what divides the cells of a .csv file; null: found in its first line")
    separator: str = setting(";", "what divides several labels in a text cell, for task=multilabel")
    classes: list[str] | None = setting(None, "names of the classes in their order; null: those in the column, sorted", distinct=True)
    split: str | None = setting(None, "column that says train, val or test; null: data.held_out, data.fold and data.test")
    weight: str | None = setting(None, "column of the images' weights in the loss, or for data.sampler=weighted")
    group: str | None = setting(None, "column of the images' groups: names or numbers")
    images_outside: bool = setting(False, "read files outside of data.root, if a path in the table leads there by itself or a link")
    test: float | None = number(None, "share of test images, scored once at the end", above=0, below=1)
    check: str = choice("headers", "off", "headers", "pixels", meaning="how much of each image is checked before the run")
    skip_corrupt: bool = setting(False, "leave out the images that cannot be read")


@dataclass
class NpzConfig(PhotosConfig):
    """Images and their classes in arrays of .npz files, which are held in memory."""

    name: str = setting("npz", "the data set")
    file: str = setting("???", "the .npz file of the training images", path="always")
    val: str | None = setting(None, "the .npz file of the held-out images; null: data.held_out or data.fold", path="always")
    test: str | None = setting(None, "an .npz file of images scored once at the end", path="always")
    images: str = setting("images", "array of the images: (N, H, W) or (N, H, W, channels)")
    labels: str = setting("labels", "array of their classes (N,): whole numbers from 0, or texts")
    classes: list[str] | None = setting(None, "names of the classes in their order; null: those of the training images", distinct=True)


@dataclass
class HubConfig(PhotosConfig):
    """A data set of Hugging Face's library `datasets`, with images of one class each; code of a data set's repository is not run.

    Without a held-out split some of the training images are held out.
    """

    name: str = setting("hf", "the data set")
    path: str = setting("???", "name on the hub, a folder that save_to_disk wrote, or a folder of images", address=True, path="if there")
    subset: str | None = setting(None, "the data set's configuration, where it has several")
    image: str | None = setting(None, "column of the images; null: the only one of images")
    label: str | None = setting(None, "column of the classes; null: the only one of classes")
    train: str = setting("train", "split to train on")
    val: str | None = setting(None, "held-out split; null: validation, valid, val or dev if it is there")
    test: str | None = setting(None, "split that is scored once at the end")
    test_share: float | None = number(None, "share of test images where no split is held out, scored once at the end", above=0, below=1)
    images_outside: bool = setting(False, "read files outside of data.path and the library's caches, if an image's path leads there")


@dataclass
class ShardsConfig(PhotosConfig):
    """WebDataset shards on disk: in a tar file the members of one name are a sample, such as 01.jpg and 01.cls; nothing is unpickled.

    Shards are read at random positions, not as streams, so that order, parts and a continued run are as those of other images.
    """

    name: str = setting("webdataset", "the data set")
    shards: str = setting("???", "tar files of training images: 'train-{000..009}.tar' or 'train-*.tar', in quotes", path="always")
    val: str | None = setting(None, "tar files of held-out images; null: data.held_out or data.fold of data.shards", path="always")
    test: str | None = setting(None, "tar files of images scored once at the end", path="always")
    image: str | None = setting(None, "ending of a sample's image, such as jpg or left.png; null: the only one of images")
    label: str | None = setting(None, "ending of a sample's class: cls, txt, json or json:FIELD; null: cls, else the only one")
    classes: list[str] | None = setting(None, "names of the classes in their order; null: those in data.shards, sorted", distinct=True)
    check: str = choice("headers", "off", "headers", "pixels", meaning="how much of each image is checked before the run")
    skip_corrupt: bool = setting(False, "leave out samples and ends of shards that cannot be read")


@dataclass
class CustomDataConfig(PhotosConfig):
    """A torch.utils.data.Dataset of (image, class index), with the names of its classes as `classes`.

    If the callable takes `split`, it is called for train, val and test, and may return None for the last two; without val, `held_out` or a
    fold of train is held out.
    """

    name: str = setting("custom", "a custom data set")
    target: str = setting("???", "a callable that returns the data set, as module:name or path/to/file.py:name", code=True)
    args: dict[str, Any] = some(dict, "its arguments, by name")


@dataclass
class BoxLossConfig:
    """The loss of boxes; auto is the detector's own: L1 of encoded boxes for RetinaNet, GIoU for FCOS."""

    name: str = setting("auto", "the loss of boxes")
    weight: float = number(1.0, "factor of this loss; the classes' loss has 1", least=0)


SCHEDULES = ("cosine", "tanh", "step", "multistep", "poly", "wsd", "rsqrt", "constant", "range")


@dataclass
class ScheduleConfig:
    name: str = choice(
        "cosine", *SCHEDULES, meaning="how the learning rate falls (timm's schedules); range: it rises from warmup_lr, for a test"
    )
    warmup_epochs: float | None = number(None, "epochs in which the learning rate rises; null: a tenth of the run", least=0)
    warmup_lr: float = number(1e-5, "learning rate at the start of the warm-up", least=0)
    min_lr: float = number(0.0, "learning rate at the end of the schedule", least=0)
    decay_epochs: float | None = number(
        None, "epochs between steps (step; null: 90), or of the last decay (wsd, rsqrt; null: a fifth)", above=0
    )
    decay_milestones: list[int] = some(lambda: [90, 180, 270], "epochs of the steps of multistep", least=1)
    decay_rate: float = number(0.1, "factor at each step of step and multistep; power of poly", above=0)


@dataclass
class OptimConfig:
    name: str = setting("adamw", "a timm optimiser (timm.optim.list_optimizers()) except adahessian, or custom")
    target: str | None = setting(None, "for name=custom: a torch.optim.Optimizer class, as module:name or path/to/file.py:name", code=True)
    lr: float = number(1e-3, "learning rate of the first update after the warm-up, and the highest", above=0)
    weight_decay: float = number(0.05, "weight decay; biases and norms have none", least=0)
    momentum: float = number(0.9, "momentum of the optimisers that have one", least=0, below=1)
    layer_decay: float | None = number(None, "factor of the learning rate from layer to layer, towards the input", above=0, most=1)
    clip: float | None = number(None, "largest norm or value of gradients; null: not clipped", above=0)
    clip_mode: str = choice(
        "norm", "norm", "value", "agc", meaning="what clip limits: the norm of all gradients, each value, or adaptive (agc)"
    )
    args: dict[str, Any] = some(dict, "more arguments of the optimiser, by name")
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)


BEST = "best"
"""The value of `trainer.keep` for the best checkpoint alone."""


@dataclass
class TrainerConfig:
    epochs: int = number(8, "how often to go through the training data", least=1)
    max_updates: int | None = number(None, "updates after which the run ends, if epochs have not ended it; null: no limit", least=1)
    device: str = setting("auto", "where to train: auto, cpu, cuda or cuda:N; auto takes a GPU if there is one")
    deterministic: bool = setting(False, "use the deterministic variant of each operation that has one")
    tf32: bool = setting(True, "compute float32 products in TF32, on GPUs that have it")
    amp: str = choice("off", "off", "bf16", "fp16", meaning="mixed precision: forward under autocast, fp16 with a loss scale")
    channels_last: bool = setting(False, "use channels-last memory format for images and convolutions")
    compile: bool = setting(False, "torch.compile the model")
    accumulate: int = number(1, "batches of each process that make up one update", least=1)
    parallel: str = choice("ddp", "ddp", "fsdp", meaning="several processes: ddp holds the model on each, fsdp shards it")
    sync_batchnorm: bool = setting(False, "normalise batches over the samples of all processes")
    ema: float | None = number(None, "decay of the weights' moving average, which is then evaluated; null: no average", above=0, below=1)
    ema_warmup: bool = setting(True, "let the decay of the average rise from 0")
    log_every: int = number(10, "updates between two records of figures", least=1)
    eval_every: int = number(1, "epochs between two evaluations", least=1)
    monitor: str | None = setting(None, "the held-out metric that marks the best epoch, such as loss; null: the task's own")
    monitor_goal: str = choice("auto", "auto", "max", "min", meaning="which values are better; auto: smaller for losses and errors")
    patience: int | None = number(None, "evaluations in a row without improvement after which the run ends", least=1)
    keep: int | str = number(
        0, "last epochs that keep checkpoints beside best.pt and last.pt; best: a finished run has no last.pt", least=0, text=BEST
    )
    save_every: int = number(1, "epochs between two checkpoints", least=1)
    save_updates: int | None = number(None, "updates between two checkpoints within an epoch; null: none", least=1)
    save_minutes: float | None = number(10.0, "minutes between two checkpoints within an epoch; null: none", above=0)
    timing_warmup: int = number(10, "updates before times are measured", least=0)
    max_nonfinite: int = number(10, "updates in a row without a finite loss or gradient after which the run ends", least=1)
    profile: bool = setting(False, "trace time and memory of a few updates, readable in Perfetto")
    runs: str | None = setting(None, "folder of run folders; null: LOSSFORGE_RUNS, else the user's file, else runs/ here")
    callbacks: list[str] = some(list, "custom code called in training (lab.training.callbacks): module:name or file.py:name", code=True)

    @property
    def kept_epochs(self) -> int:
        """Return how many of the last epochs keep their checkpoints."""
        return 0 if self.keep == BEST else int(self.keep)


@dataclass
class ExportConfig:
    format: str = choice(
        "pt2",
        "pt2",
        "onnx",
        meaning="form of the exported model; onnx: for ONNX Runtime, beside .pt2; tracking.model=false: no .pt2",
    )
    precision: str = choice("fp32", "fp32", "bf16", "fp16", meaning="weights and arithmetic of the exported model; images and output stay")
    any_size: bool = setting(False, "let the exported model take images of any height and width that are multiples of 32")


@dataclass
class TrackingConfig:
    enabled: bool = setting(True, "send the run to MLflow")
    uri: str | None = setting(None, "store; null: MLFLOW_TRACKING_URI, else the user's file, else mlflow.db here")
    experiment: str = setting("lossforge", "MLflow's experiment that the run belongs to")
    artifacts_outside: bool = setting(False, "let an SQLite store keep files outside of its folder, if its experiment says so")
    tags: dict[str, str] = some(dict, "more tags of the run")
    system_seconds: float = number(5.0, "seconds between two records of the machine's load", above=0)
    patience_seconds: float = number(60.0, "seconds to wait at the end for a store that fails", least=0)
    model: bool = setting(True, "export the best model, so that MLflow loads and serves it")
    register: str | None = setting(None, "name in the model registry; the best model becomes its new version")
    writers: list[str] = some(list, "other places that get the run's figures", choices=("tensorboard", "wandb"))


@dataclass
class TrainConfig:
    name: str | None = setting(None, "the run's name; null: loss-model-data")
    seed: int = number(0, "seed of weights, order, augmentation and dropout", least=0)
    resume: str | None = setting(None, "a run's folder or checkpoint to go on with; auto: the newest unfinished run of these settings")
    trust: str | None = setting(None, "a file or folder whose settings may name code, for resume=, task.teacher= or checkpoint=")
    task: TaskConfig = field(default_factory=ClassificationConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LOSSES["ce"])
    box_loss: BoxLossConfig = field(default_factory=BoxLossConfig)
    data: DataConfig = field(default_factory=DigitsConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


@dataclass
class BenchConfig:
    """What to measure; filters take names or globs, and an empty one takes all."""

    name: str | None = setting(None, "the run's name; null: made from the filters")
    mode: str = choice("measure", "measure", "profile", meaning="profile: a trace, and every kernel's time, registers and spills, for ours")
    suite: list[str] = some(list, "names of suites, or globs")
    loss: list[str] = some(list, "names of losses, or globs")
    shape: list[str] = some(list, "names of shapes, or globs")
    dtype: list[str] = some(list, "names of dtypes, or globs")
    contenders: list[str] = some(list, "names of the implementations to measure, or globs")
    device: str = setting("auto", "where to measure: auto, cuda, cuda:N or cpu")
    milliseconds: float = number(80.0, "how long to repeat for each figure", above=0)
    seed: int = number(0, "seed of the samples", least=0)
    forward: bool = setting(True, "measure forward on its own, too")
    out: str | None = setting(None, "a file to write the report to as well (lossforge.bench.compare reads two)")
    commit: str | None = setting(None, "the commit's name, if the sources are not a git checkout")
    runs: str | None = setting(None, "folder of runs; null: as trainer.runs")
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


LIMITS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "above": ("above", operator.gt),
    "least": ("at least", operator.ge),
    "below": ("below", operator.lt),
    "most": ("at most", operator.le),
}
"""The limits of a number: in words, and what a value inside them holds against them."""


def range_text(limits: Any) -> str:
    """Return a range in words, such as 'above 0, at most 1'."""
    return ", ".join(f"{word} {limits[key]:g}" for key, (word, _) in LIMITS.items() if limits.get(key) is not None)


def check(config: Any, path: str = "") -> None:
    """Raise UserError for the first value that is nan, infinite, or outside its range or choices."""
    for item in fields(config):
        value = getattr(config, item.name)
        key = f"{path}{item.name}"
        if is_dataclass(value):
            check(value, f"{key}.")
        elif value is not None:
            _check_value(key, value, item)


def _check_value(key: str, value: Any, item: "Field[Any]") -> None:
    limits = item.metadata
    if choices := limits.get("choices"):
        for each in value if isinstance(value, list) else [value]:
            if each not in choices:
                raise unknown(f"{key}={value}", each, choices)
    if limits.get("distinct") and (twice := [each for each in value if value.count(each) > 1]):
        raise UserError(f"{key}={value}: {twice[0]!r} is named twice.")
    if limits.get("pair") and (len(value) != 2 or value[0] > value[1]):
        raise UserError(f"{key}={value}: the smallest and the largest value are expected.")
    if (text := limits.get("text")) and value != text and not isinstance(value, int):
        raise UserError(f"{key}={value}: a whole number {range_text(limits)}, or {text}, is expected.")
    for each in _numbers(value):
        if not isfinite(each) or not _inside(each, limits):
            wanted = f"{'' if isfinite(each) else 'finite '}numbers {range_text(limits)}".strip()
            raise UserError(f"{key}={value}: {each:g} is out of range; {key} takes {wanted}.")


def _numbers(value: Any) -> list[int | float]:
    """Return a number, or all numbers of a list or a map, at any depth."""
    if isinstance(value, (dict, list)):
        return [number for each in (value.values() if isinstance(value, dict) else value) for number in _numbers(each)]
    return [value] if isinstance(value, (int, float)) else []


def _inside(value: float, limits: Any) -> bool:
    return all(holds(value, limits[key]) for key, (_, holds) in LIMITS.items() if limits.get(key) is not None)


@dataclass
class SearchConfig:
    """Every combination of the values given."""

    name: str = setting("grid", "how jobs are chosen")


@dataclass
class OptunaConfig(SearchConfig):
    name: str = setting("optuna", "how jobs are chosen")
    trials: int = number(20, "total number of jobs", least=1)
    parallel: int = number(1, "number of jobs that are chosen at a time", least=1)
    seed: int = number(0, "seed of the choice", least=0)


SEARCHES: dict[str, type[SearchConfig]] = {"grid": SearchConfig, "optuna": OptunaConfig}


@dataclass
class SweepConfig:
    search: SearchConfig = field(default_factory=SearchConfig)
