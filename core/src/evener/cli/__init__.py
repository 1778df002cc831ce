"""The command line: ``evener COMMAND …``. Each command is a module with ``main(argv) -> int``, imported only when that
command runs."""
