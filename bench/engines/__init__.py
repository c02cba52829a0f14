"""What the engine question is made of: cases, sides, and what the hardware allows.

A side is a file: `node.py` is ours, and each peer runs in a process of its own. `vllm.py` runs in
an environment of its own and imports nothing of splitserve; `llama.cpp` is compiled. `roster.py`
knows where each peer is found and what is expected of it.
"""
