"""``evener calibrate``: scales of keys and values from a text. Torch-free to import.

=============  ======================================================================
module         holds
=============  ======================================================================
``command``    the command
``text``       the text that is read
``windows``    runs a model over windows of tokens, and hands out its keys and values
``observer``   the largest numbers that were seen, or a percentile of them
=============  ======================================================================
"""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="calibrate",
    summary="Make scales of the KV cache from a text (`evener calibrate`).",
    contracts={"descriptor": 1},
    commands={"calibrate": "evener_calibrate.command:main"},
)
