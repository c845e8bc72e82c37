"""How far a result may be from its authority, each with the reason. A row never loosens without a new reason in the same commit."""

LOGITS_OF_LARGEST = 2e-5
"""fp32 logits against transformers: largest difference of a row over the row's largest |logit|. Two fp32 forwards of 11 layers
that differ in the order of sums (absorbed or not) were measured 1.7e-5 apart."""

CHOICE_GAP = 1e-5
"""A score gap at a top-k or router boundary below which two correct fp32 forwards may choose differently; over the largest |score|
of the row when that is above 1, because fp32 resolution is relative."""

EXPANDED_RELATIVE_RMS = 2e-6
"""Expanded against absorbed attention in fp32: the same mathematics with the matrix products in another order."""

PERPLEXITY_CHANGE_PERCENT = {"bf16": 0.1, "fp8_e4m3": 0.5, "fp8_ds_mla": 0.5, "nvfp4_ds_mla": 1.5}
"""Against an fp32 cache, by main cache format, in either direction. Measured on all held-out texts: 0.01, 0.23, 0.12, 0.39."""

CACHE_DIVERGENCE = {"bf16": 3e-6, "fp8_e4m3": 6e-4, "fp8_ds_mla": 1e-4, "nvfp4_ds_mla": 1.2e-3}
"""KL divergence from an fp32 cache, nats a token, about three times what the slice gives: 1.1e-6, 2.2e-4, 3.6e-5, 4.6e-4. The error
is the format's; a reader that takes nvfp4 scales for the wrong tiles was measured at 3.7e-3."""
