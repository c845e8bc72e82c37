"""Compiled CPU kernels: C++ sources, their one build, and typed calls into it. Optional: without a compiler torch serves."""
