"""Parsers of tool calls, a module for each kind of format."""
