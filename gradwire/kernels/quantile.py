"""quantile: the k largest entries beyond a quantile of a normal distribution, after a scan that
has counted how large they are."""

from torch import Tensor

from gradwire.kernels.edge import Edge


def quantile(
    u: Tensor, scale: float, k: int, maxima: Tensor, group: int, edge: Edge
) -> tuple[Tensor, Tensor, Tensor]:
    """What `above` finds for the threshold of `Rule.NORMAL`, which takes no launch of its own.

    CUDA only, where `edge.has_counts`. The mean square is that of the entries the scan counted; the
    threshold is held between two magnitudes that k and 1.25 k groups surely reach.
    """
    from gradwire.kernels.topk_triton import quantile_triton

    return quantile_triton(u, scale, k, maxima, group, edge)
