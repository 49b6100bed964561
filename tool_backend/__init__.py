"""The Python SDK for tool authors, and the built-in tools."""
