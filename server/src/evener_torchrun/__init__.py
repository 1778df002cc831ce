"""Ranks that torchrun has started, on one machine or on several. Torch-free, unless this process is a worker."""
