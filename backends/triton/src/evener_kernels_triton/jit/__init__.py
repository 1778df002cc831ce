"""Device code in Triton's language. No kernel assumes a warp width or a vendor; sizes come from ``tuning``."""
