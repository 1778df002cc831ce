"""How people write configuration keys: config files and command lines, and legacy spellings.

====================  ================================================================================
module                holds
====================  ================================================================================
``command_line``      the configuration of a command line
``hydra_boundary``    config files and the grammar of values on the command line; the only user of Hydra
``legacy_keys``       old spellings of keys
====================  ================================================================================

Torch-free.
"""
