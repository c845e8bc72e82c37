"""Does a person see it? Pages in headless Chromium."""
