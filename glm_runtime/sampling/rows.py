"""What a row to sample is, and what comes of it.

Knows: everything that a row's token may depend on beside its logits. Does not know steps, sequences or requests.
"""

from collections.abc import Sequence

import msgspec
from torch import Tensor

from glm_runtime.sampling.history import TokenHistory
from kv_transfer.request_values import SamplingParameters, TokenLogprobs


class SampleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of logits, and how the token after it is drawn. A struct, since one is made for each row of each step.

    token_index: which output token of its request the row draws, from 0 over all attempts; it keys the noise.
    history: prompt and output of the sequence, without `drafts`; needed where `parameters.reads_history` says so, otherwise None will do.
    drafts: drafted tokens between the history and this row; the row sees them as output.
    mask: [ceil(V / 32)] int32 on the CPU, bit i of word w set when token 32 w + i may be drawn (xgrammar's and llguidance's form);
    None allows all. Only read while the step runs.
    """

    parameters: SamplingParameters
    token_index: int
    history: TokenHistory | None = None
    drafts: Sequence[int] = ()
    mask: Tensor | None = None


class Sample(msgspec.Struct, frozen=True):
    """The token that a row has drawn; logprobs where its parameters ask for them."""

    token: int
    logprobs: TokenLogprobs | None = None
