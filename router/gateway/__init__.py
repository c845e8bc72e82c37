"""The OpenAI-compatible gateway: text and HTTP live here and nowhere else. No torch, no Ray, no NIXL."""
