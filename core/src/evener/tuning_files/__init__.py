"""Files of times that ``evener tune`` measured: read at a start, and written by the command."""
