"""What happens when code of a package ends this process.

``watched``  the end is refused, or named on standard error with an exit code that is not 0
"""
