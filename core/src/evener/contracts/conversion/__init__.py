"""Changing how a checkpoint stores its weights: quantizing it while it is read."""
