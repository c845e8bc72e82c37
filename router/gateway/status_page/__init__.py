"""The status page: three static files, no build step, nothing from another host."""
