"""References of the primitive ops in plain torch, for any device. Each function takes ``(static, use)`` and returns the
callable."""
