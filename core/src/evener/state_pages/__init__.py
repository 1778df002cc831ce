"""Pages of quantized state: what their elements mean."""
