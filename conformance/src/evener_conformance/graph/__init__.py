"""Graph capture without an accelerator: a device on the CPU that records steps and replays them."""
