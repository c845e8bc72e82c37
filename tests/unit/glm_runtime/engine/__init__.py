"""Unit tests of the engine parts that both workers share."""
