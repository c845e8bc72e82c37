"""The sum owed to the residual stream and the norm that follows it, in one."""

from torch import Tensor

from glm_runtime.ops.add_rms_norm import native, reference
from glm_runtime.ops.impl import Impl, check_shape

__all__ = ["add_rms_norm"]


def add_rms_norm(
    residual: Tensor, owed: tuple[Tensor, ...], weight: Tensor, eps: float, *, impl: Impl | None = None
) -> tuple[Tensor, Tensor]:
    """The new residual stream and its norm. See `reference.py`, which is what serves without compiled kernels.

    Raises ValueError for shapes that do not fit together and for more than two summands.
    """
    check_shape("add_rms_norm", "weight", weight, (residual.shape[1],))
    for summand in owed:
        check_shape("add_rms_norm", "owed", summand, tuple(residual.shape))
    if len(owed) > 2:
        raise ValueError(f"add_rms_norm: {len(owed)} summands are owed; expected at most 2")
    if impl == "native":
        return native.add_rms_norm(residual, owed, weight, eps)
    return reference.add_rms_norm(residual, owed, weight, eps)
