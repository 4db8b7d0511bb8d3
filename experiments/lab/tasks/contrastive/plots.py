"""The picture of a retrieval."""

from pathlib import Path

from lab.base.files import save_figure
from lab.data.sets import Norm
from lab.tasks.contrastive.captions import text_of
from lab.tasks.contrastive.metrics import RetrievalResult


def retrieval_picture(result: RetrievalResult, words: list[str], norm: Norm, path: Path) -> None:
    """Draw held-out images, each with the captions most similar to it; its own is bold, and below the others if it is not among them."""
    import torch
    from matplotlib.figure import Figure

    mean, std = (torch.tensor(value).view(-1, 1, 1) for value in (norm.mean, norm.std))
    figure = Figure(figsize=(7, 1.5 * len(result.images) + 0.4), layout="constrained")
    rows = figure.subplots(len(result.images), 2, squeeze=False, width_ratios=(1, 4))
    for (left, right), image, tokens, nearest in zip(rows, result.images, result.captions, result.nearest, strict=True):
        left.imshow((image * std + mean).clamp(0, 1).permute(1, 2, 0).numpy(), interpolation="nearest")
        own, found = text_of(tokens.tolist(), words), [text_of(each, words) for each in nearest.tolist()]
        lines = [(f"{number}. {text}", text == own) for number, text in enumerate(found, 1)]
        lines += [] if own in found else [(f"its own: {own}", True)]
        for number, (line, bold) in enumerate(lines):
            right.text(0, 0.85 - 0.24 * number, line, fontsize=11, weight="bold" if bold else "normal", va="center")
        for axes in (left, right):
            axes.set_axis_off()
    values = result.values
    figure.suptitle(f"the most similar of {values['samples']:.0f} captions · recall@1 {values['text_recall1']:.2%}", fontsize=11)
    save_figure(figure, path, dpi=110)
