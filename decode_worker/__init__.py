"""A decode worker: pulls blocks, then produces tokens."""
