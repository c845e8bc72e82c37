"""The shipped checkpoint: configuration, weights, tokenizer and chat template of a small trained GLM. A package so that wheels carry it."""
