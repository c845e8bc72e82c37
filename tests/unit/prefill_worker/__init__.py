"""Unit tests of the prefill worker."""
