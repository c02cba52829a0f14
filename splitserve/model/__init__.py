"""Decoder models over paged KV.

Shapes in tensor comments follow one legend:
    B batch (rows of a step), T tokens, L layers, H query heads, K KV heads, D head size,
    E hidden size, S block size, N blocks, V vocabulary.

This file imports nothing: the router reads `splitserve.model.config` and must never load torch.
"""
