"""Parsers of what a model writes before its answer."""
