"""What each command of `fermata` does; imported only when it is run."""
