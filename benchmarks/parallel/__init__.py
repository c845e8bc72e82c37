"""Several ranks: what they exchange in a step, how long that takes here, and which way of sharing a cache a link favours."""
