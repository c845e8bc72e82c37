"""How probable the best token of each row is."""

from torch import Tensor

from glm_runtime.ops.impl import Impl, check_shape, choose_impl
from glm_runtime.ops.top_probability import cpu, native, reference

__all__ = ["top_probability"]


def top_probability(logits: Tensor, largest: Tensor, *, impl: Impl | None = None) -> Tensor:
    """softmax(logits) at each row's largest logit, which is known. See `reference.py`. Raises ValueError for shapes that do not fit."""
    check_shape("top_probability", "logits", logits, (-1, -1))
    check_shape("top_probability", "largest", largest, (logits.shape[0],))
    match choose_impl(impl, logits):
        case "native":
            return native.top_probability(logits, largest)
        case "cpu":
            return cpu.top_probability(logits, largest)
        case "reference":
            return reference.top_probability(logits, largest)
