"""The ``fermata`` command and the local cluster behind ``fermata demo``."""
