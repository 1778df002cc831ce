"""What happens when code of a package ends this process.

``watched``  the end is refused, or reported on standard error with an exit code other than 0
"""
