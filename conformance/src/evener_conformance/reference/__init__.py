"""A backend on reference ops, its devices, and engines that run one step at a time."""
