"""Beam search over an engine's likeliest tokens: ``search`` is the algorithm, ``stream`` runs it on an ``AsyncLLM``.

Torch-free.
"""
