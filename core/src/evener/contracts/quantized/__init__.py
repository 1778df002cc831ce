"""Quantized state: who decides about it, and who stores it."""
