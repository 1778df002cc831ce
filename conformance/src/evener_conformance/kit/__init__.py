"""The conformance kit: whether a backend keeps the contracts. ``evener conformance --backend NAME``; a pytest plugin.

Nothing here imports torch before a backend is opened: ``outcome``, ``report`` and ``plugin`` are torch-free.
"""
