"""What packages add around the text that a model generates: readers of its tool calls and of its reasoning."""
