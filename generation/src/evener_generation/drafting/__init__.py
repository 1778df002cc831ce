"""Speculative decoding: tokens of a request are proposed and checked in one step, together with its last token.

A step costs little more for a few tokens of a request than for one, because it reads the same weights. A drafter of
``evener.contracts.generation.drafter`` proposes the next tokens. The plan's row computes them as if they existed and
samples behind each; what was sampled tells how many were right. A position's random number
depends on the request's seed and the position alone, and a proposal is one token, not a distribution. So each token is
drawn from the model's own distribution, and is the same as without drafts; this is the rejection sampling of Leviathan
et al., "Fast Inference from Transformers via Speculative Decoding" (2023), for such proposals.

=================  ===========================================================
module             what it holds
=================  ===========================================================
``speculation``    which requests get drafts, and how many tokens
``payoff``         whether drafts make more tokens a second at the present load
``ngram_drafter``  drafts from earlier in the text
``grammar_drafter``  no drafts but what a grammar forces
``model_drafter``  drafts that the worker finds: a draft model, a head, MTP
=================  ===========================================================
"""
