"""Ways to move blocks between two processes: real (NIXL) and in-process with a fault plan (loopback)."""
