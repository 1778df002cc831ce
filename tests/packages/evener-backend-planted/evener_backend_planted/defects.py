"""Every fault, in a sentence. Each is one that has been shipped by somebody."""

import os

DEFECTS = {
    "attention-scale": "scores are divided by the root of the head's size, whatever scale the model asks for",
    "block-boundary": "at a length that fills its last block the newest token is not seen",
    "reads-beyond": "the last block is read to its end, whatever was left there by others",
    "tail-unwritten": "a step's tokens are written in fours, and one that is left over is not",
    "heads-mixed": "query head h reads key head h modulo the key heads, not h divided by the group",
    "window-wide": "a window shows one token more",
    "softcap-forgotten": "the soft cap on scores is ignored",
    "copy-half": "copying a block copies its keys and leaves the values",
    "export-unturned": "values are exported in the order in which they are kept, with heads before tokens",
    "bytes-short": "the bytes of a block are counted for its keys alone",
    "company": "attention says that company does not matter, and rounds to bfloat16 where there are over four requests",
    "norm-padded": "the mean of a norm is taken over a width that is rounded up to a multiple of 16",
    "norm-half": "a norm's squares are summed in the compute type",
    "linear-tail": "rows of a product beyond the last multiple of eight are never written",
    "linear-strides": "an input whose rows do not lie one after another is read as if they did",
    "activation-in-place": "gate and up are multiplied in place, in an input that was not donated",
    "output-reused": "every call of one site gives out the same buffer",
    "noise": "sums come in an order that depends on the run; determinism is claimed",
    "greedy-last": "among equal logits the highest id wins",
    "rotary-table": "positions beyond 64 are those of 64",
    "residual-rounded": "the residual stream is rounded to the compute type",
    "readback-live": "what is read back changes when the tensor on the device does",
    "memory-lies": "more memory is free than there is",
    "dtype-claimed": "float16 is claimed, and products in it fail",
    "graph-stale": "a replay shows what the capture computed, whatever its inputs are now",
    "sum-tail": "a sum over ranks leaves out the last element of an odd number",
    "too-much-supported": "more than 64 tokens are accepted at start-up and refused at run time",
    "scratch-unnamed": "a norm takes ten times the scratch memory that it names for the memory plan",
    "eps-fixed": "norms add 1e-6 to the mean of squares, whatever the model asks for",
    "block-tall": "the fused MLP block drops the bias of gate and up beyond 40 rows, where it takes another path",
    "window-long": "a window that is longer than 64 tokens shows one token more",
    "linear-deep": "a product leaves out the columns beyond 1,024",
    "linear-wide": "rows of a product beyond 4,096 are half of what they should be",
    "float32-rounded": "a product that is asked for in float32 is rounded to bfloat16 first",
    "norm-tall": "a norm whose width 64 divides takes another path beyond 64 rows, which forgets the weight",
    "block-forgets-norm": "the fused MLP block does not add the residual before its norm",
}

DEFECT = os.environ.get("PLANTED_DEFECT", "")
if DEFECT and DEFECT not in DEFECTS:
    raise ValueError(f"PLANTED_DEFECT={DEFECT} is none of {', '.join(DEFECTS)}")


def planted(name):
    """Whether this fault is in the backend now."""
    assert name in DEFECTS
    return name == DEFECT
