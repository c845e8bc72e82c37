"""Unit tests of the decode worker."""
