"""The frozen target: facts from its folder, its weights, and the forward pass that yields features.

`facts` and `shapes` answer from `config.json` and the tokenizer files alone and import no torch; `load` builds the `FrozenTarget`.
"""
