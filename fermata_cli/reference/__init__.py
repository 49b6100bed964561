"""What can be set and what is measured, told from the code that sets and measures it."""
