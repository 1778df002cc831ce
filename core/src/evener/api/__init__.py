"""What ``LLM`` and ``AsyncLLM`` do beside generating text: each module has what both inherit."""
