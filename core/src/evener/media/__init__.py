"""Media in prompts: rows that stand for tokens, from a caller or an encoder; who plans them, who keeps them."""
