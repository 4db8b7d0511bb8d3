"""Object keypoint similarity as a loss: of all keypoints of an object, so a plain function."""

from torch import Tensor


def oks_loss(input: Tensor, target: Tensor, visible: Tensor, area: Tensor, sigmas: Tensor) -> Tensor:
    """Return the mean of 1 - OKS over objects, OKS = Σ v exp(-d² / (2 s² k²)) / Σ v, k = 2σ (YOLO-Pose, arXiv 2204.06806; COCO).

    input, target: (N, K, 2), in pixels. visible: (N, K), 1 or 0. area: (N,), s², in pixels². sigmas: (K,), of each kind of keypoint.
    """
    squared = (input - target).square().sum(-1)
    similarity = (-squared / (2 * area[:, None] * (2 * sigmas).square())).exp()
    return 1 - ((visible * similarity).sum(1) / visible.sum(1).clamp(min=1)).mean()
