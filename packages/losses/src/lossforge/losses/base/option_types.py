"""The values that options take, for annotations."""

from typing import Annotated, Literal, NamedTuple

try:
    from torch.distributed import DeviceMesh as DeviceMesh
    from torch.distributed import ProcessGroup as ProcessGroup
except ImportError:  # torch built without torch.distributed
    DeviceMesh = ProcessGroup = object  # type: ignore[assignment, misc]

Reduction = Literal["none", "mean", "sum"]
BatchReduction = Literal["none", "batchmean", "mean", "sum"]
ScalarReduction = Literal["mean", "sum"]
Gradient = Literal["forward", "backward"]
Empty = Literal["nan", "zero"]
Activation = Literal["softmax", "sigmoid"]
Averaged = Literal["present", "all"]
TokenWeight = Literal["probability", "entropy"]
Independent = Literal["tokens", "sequences", "pairs"]
BoxFormat = Literal["xyxy", "cxcywh"]
MarginStrategy = Literal["absolute", "relative"]
RowOutput = Literal["z_loss", "lse", "entropy", "correct", "argmax", "log_p2", "mean_logit"]
DivergenceOutputs = Literal["entropy"]
DraftOutputs = Literal["entropy", "acceptance"]
DraftKind = Literal["lk", "log_tv", "tv", "kl", "ce"]
MTPOutputs = Literal["losses"]
RouterOutput = Literal["z_loss"]
PolicyOutput = Literal["clipped_low", "clipped_high", "kl"]
ValueOutput = Literal["clipped"]
Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]


class Range(NamedTuple):
    """The numbers that a hyper-parameter takes in a config: `above` and `below` are outside, `least` and `most` inside.

    A parameter of a loss whose type has one is a hyper-parameter.
    """

    above: float | None = None
    least: float | None = None
    below: float | None = None
    most: float | None = None


Real = Annotated[float, Range()]
Positive = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(least=0)]
UnitInterval = Annotated[float, Range(least=0, most=1)]
BelowOne = Annotated[float, Range(least=0, below=1)]
Balance = Annotated[float, Range(least=-1, most=1)]
"""The share of positives in [0, 1]; below 0 there is none."""
