"""Runs vLLM's own tests of its HTTP API against ``evener serve``. Imported by pytest in the peers' environment
(``make test-peers``), where neither vLLM nor evener is installed.

============  ==============================================================================
module        content
============  ==============================================================================
``plugin``    the pytest plugin: puts the rest in place and writes what came of each test
``package``   stands where the package ``vllm`` would be
``utilities`` stands where vLLM's ``tests/utils.py`` would be
``server``    its ``RemoteOpenAIServer``, which starts ``evener serve``
``flags``     vLLM's command-line flags as keys of evener
``adapters``  an adapter of the served model, for tests that download one
``vectors``   reads and compares vectors that a server sends
============  ==============================================================================
"""
