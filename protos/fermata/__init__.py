"""The wire contracts of Fermata, as generated Python; import ``fermata.v1``."""
