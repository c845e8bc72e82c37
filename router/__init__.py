"""Placement, relay and the OpenAI-compatible gateway. Never imports torch, ray or nixl."""
