"""From logits to tokens: parameters, histories, processors, filters, noise keyed by (seed, token index), and the sampler."""
