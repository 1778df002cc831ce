"""Quantizers: what ``quant=q4_k`` and its like do to the matrices of an unquantized checkpoint.

=================  ==================================================================
module             holds
=================  ==================================================================
``block_types``    numbers to GGUF's blocks of 32, the same bits as ggml
``k_types``        numbers to GGUF's blocks of 256 (k-quants), by a search of our own
``blocks``         the quantizers of these blocks, and their mixtures (q4_k_m)
``eight_bits``     the quantizers fp8 and int8
``four_bits``      the quantizer int4
``rules``          formats for single matrices, by their names
=================  ==================================================================
"""
