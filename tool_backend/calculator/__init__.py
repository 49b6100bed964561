"""The calculator: a built-in tool that computes exactly, in bounded work."""
