"""A local cluster: every node of a run as a process of its own on this machine."""
