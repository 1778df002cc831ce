"""Resolution: every op, state group and packing of a model gets its provider here, once, before the first step."""
