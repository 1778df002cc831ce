"""Ready-made parts of backends: a device with a namespace in torch, and native code compiled on the machine."""
