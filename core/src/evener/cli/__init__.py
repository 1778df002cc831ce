"""The command line: ``evener COMMAND …``. Each command is a module with ``main(argv) -> int``, imported when it is
asked for."""
