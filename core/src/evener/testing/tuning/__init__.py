"""What ``evener tune`` does: kernels are compared with the reference, as in the checks beside it, and timed. Nothing of
it is imported when a model serves."""
