"""What the files of a tokenizer say about the bytes of its tokens.

``token_bytes``  the bytes that each token becomes
``text_bound``   the most bytes of text that a token may stand for
"""
