"""Mutants of our kernels, and what the conformance kit says about each (``scripts/mutants.py``)."""
