"""How far a result may be from its authority, each with the reason. A row never loosens without a new reason in the same commit."""

LOGITS_OF_LARGEST = 2e-5
"""fp32 logits against transformers: largest difference of a row over the row's largest |logit|. Two fp32 forwards of 11 layers
that differ in the order of sums (absorbed or not) were measured 1.7e-5 apart."""

CHOICE_GAP = 1e-5
"""A score gap at a top-k or router boundary below which two correct fp32 forwards may choose differently; over the largest |score|
of the row when that is above 1, because fp32 resolution is relative."""

EXPANDED_RELATIVE_RMS = 2e-6
"""Expanded against absorbed attention in fp32: the same mathematics with the matrix products in another order."""
