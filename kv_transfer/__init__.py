"""What a cache block is on the wire and how it changes hands between workers."""
