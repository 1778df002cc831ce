"""Kernels of ``evener_kernels_triton``, compiled for known cards and models. ``evener_kernels_triton.binaries`` reads
the files beside this one, and does not import it."""
