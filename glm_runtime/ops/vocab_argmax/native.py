"""The compiled form: one pass over the logits. Contract: `reference.py`."""

import torch
from torch import Tensor

from glm_runtime.native.library import library
from glm_runtime.ops.impl import is_bf16_rows
from glm_runtime.ops.vocab_argmax.reference import Best


def vocab_argmax(logits: Tensor, first_id: int) -> Best:
    """Contract: `reference.vocab_argmax`. Raises ValueError for dtypes other than fp32 and bf16."""
    num_rows, width = logits.shape
    values, ids = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
    is_finite = torch.empty(num_rows, dtype=torch.bool)
    library().glm_vocab_argmax(
        logits.data_ptr(), logits.stride(0), is_bf16_rows("vocab_argmax", "logits", logits),
        values.data_ptr(), ids.data_ptr(), is_finite.data_ptr(), num_rows, width,
    )  # fmt: skip
    return Best(values, ids + first_id if first_id else ids, is_finite)
