"""A prefill worker: computes prompts chunk by chunk and hands their blocks off."""
