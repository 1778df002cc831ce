"""Folders that evener makes for itself: the user's cache, and the scratch folder of one run. Torch-free."""
