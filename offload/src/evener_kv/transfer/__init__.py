"""KV cache blocks of a prompt come from another server: one computes prompts (prefill), another goes on (decode).

=================  ============================================================================================
module             holds
=================  ============================================================================================
``connector``      the connector: where its two halves are made
``settings``       what the operator has set
``fingerprint``    what both servers must have in common
``remote_blocks``  the controller's half: blocks that are held for others, and requests that wait for blocks
``held_blocks``    blocks that are held, and who is reading them
``landing``        the workers' half: sends blocks, and keeps those that were fetched
``connection``     TCP connections between servers that have the same key
``messages``       what they say
=================  ============================================================================================

The order of requests is that of vLLM's NIXL connector, so that routers made for it can drive both: the server that
decodes fetches, and the other one holds the blocks meanwhile. Blocks are named by the digests of their tokens, which
both servers compute, so no router can mix them up. A server is checked at the end of a fetch: what it has released
meanwhile does not count.
"""
