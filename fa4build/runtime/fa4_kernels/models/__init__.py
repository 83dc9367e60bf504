"""Which kernels a model needs: from a published `config.json` to the calls of its layers and the kernels behind them.

    config.json -> parts of layers (`reading`) -> problems for a use (`needs`) -> what installed packs say (`serving`)

Nothing here imports torch or transformers, opens a device, or knows which kernels are written: that is the builder's.
"""
