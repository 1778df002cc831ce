"""Ranks: the default communicator."""
