"""Composition: configuration, actors, supervisor and the command line."""
