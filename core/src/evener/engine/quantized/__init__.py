"""Quantized state in a run: asking the installed package how state is stored, and giving layers their scales."""
