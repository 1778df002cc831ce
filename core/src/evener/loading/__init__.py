"""Reading model folders: checkpoints, quantization schemes, the loader and its estimate."""
