"""Structured output: which tokens may come next, so that the text of an answer follows a grammar."""
