"""Ready-made parts of backends whose device has a namespace in torch; a backend brings the names."""
