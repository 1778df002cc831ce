"""The front end: text to token ids and back. Templates, tokenizing, detokenizing, stop strings; no HTTP, no threads,
no torch."""
