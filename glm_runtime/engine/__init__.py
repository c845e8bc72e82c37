"""From step plans to tokens: the plan, the runner that executes it, and one-process generation."""
