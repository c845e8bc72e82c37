"""Real implementations of our interfaces, small enough for tests."""
