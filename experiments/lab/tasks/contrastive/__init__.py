"""Contrastive learning: encoders that give an image and its caption similar features, or images of one class, or two views of one image."""

from dataclasses import dataclass

from lab.config.fields import number, setting
from lab.config.loss_schema import LOSSES, OF_FEATURES
from lab.config.schema import DataConfig, ImagesConfig, SplitConfig, TaskConfig
from lab.data.spec import DataSpec
from lab.tasks.spec import TaskSpec


@dataclass
class ContrastiveConfig(TaskConfig):
    """The image encoder is the model; its classifier, of `width` numbers, is the projection to the common space.

    An image is compared with the captions, or the images, of its own batch in its own process: data.batch_size sets the number of
    negatives.
    """

    name: str = setting("contrastive", "the task")
    width: int = number(64, "features of an image or a text in their common space", least=1)
    text_width: int = number(64, "features of a word in the text encoder, for images with captions", least=1)


@dataclass
class DigitCaptionsConfig(SplitConfig, DataConfig):
    """Drawn images of two coloured digits with captions, such as "a large red 7 left of a small blue 3".

    No caption occurs twice, in one part of the data or in two of them; no digit is in two parts.
    """

    name: str = setting("digit_captions", "the data set")
    augment: bool = setting(False, "no effect: a change of these images could change what their captions say")
    image_size: int = number(32, "pixels a side that the model sees", least=16)
    train_pairs: int = number(8192, "pairs to train on", least=1)
    val_pairs: int = number(1000, "held-out pairs, of held-out digits; recall is among these", least=1)
    test_pairs: int = number(1000, "test pairs, where data.test is set", least=1)
    pair_seed: int = number(0, "seed of what is drawn", least=0)
    test: float | None = number(None, "share of the digits in test pairs, scored once at the end", above=0, below=1)


OF_CAPTIONS = tuple(name for name, schema in LOSSES.items() if schema.takes == "features")
OF_IMAGES = tuple(name for name, schema in LOSSES.items() if schema.takes in OF_FEATURES or name in ("arcface", "cosface"))
SPEC = TaskSpec(
    config=ContrastiveConfig,
    data=(DigitCaptionsConfig, ImagesConfig),
    losses=(*OF_CAPTIONS, *OF_IMAGES),
    build="lab.tasks.contrastive.task:build",
    predict="lab.tasks.contrastive.task:predict",
    read=("top",),
    export="lab.tasks.contrastive.task:export",
    data_sources=(DataSpec(name="digit_captions", schema=DigitCaptionsConfig),),
)
