"""The hook: what the descriptor announces."""

from evener.contracts.hooks import hookimpl

from evener_state_example.rows import Rows


@hookimpl
def evener_state_providers(device, options):
    return [Rows()]
