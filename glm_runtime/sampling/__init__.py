"""From logits to tokens: noise keyed by (seed, token index), and the sampler."""
