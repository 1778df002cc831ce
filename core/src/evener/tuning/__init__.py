"""What ``evener tune`` does: kernels are compared with the reference and timed. Not imported while serving."""
