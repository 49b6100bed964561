"""A run while it goes on: what its processes tell, gathered and shown."""
