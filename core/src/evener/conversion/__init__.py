"""Changing how a checkpoint stores its weights: which tensors are matrices, and quantizing them while they are read."""
