"""Plans: what fits where, computed from configurations and layouts alone."""
