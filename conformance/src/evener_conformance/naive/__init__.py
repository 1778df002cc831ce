"""A second implementation of models and state, written for clarity, to compare the engine with."""
