"""The Qwen3-MoE model on a (dp, tp) mesh: what the devices compute, and how its weights get there.

Forward pass and sampling:

- ``step``: the jitted step and its state on the devices; ``inputs`` are the arrays that it takes and returns.
- ``transformer``: layers and forward pass; ``rope`` rotates queries and keys.
- ``moe``: the exchange of tokens between the ranks that hold experts; ``experts`` moves expert weights between ranks.
- ``sampling`` chooses tokens, and ``prompt_logprobs`` computes log probabilities of prompts.
- ``sharding``: the mesh, and the mesh axes of each parameter axis.
- ``memory``: bytes that a mesh needs on each device; ``sizes`` are those that depend on the model alone.

Checkpoints:

- ``hub`` finds or downloads a folder, and ``fingerprint`` identifies it.
- ``hf_config`` parses config.json, with ``json_reader`` and ``hf_rope``.
- ``loading`` loads any folder. ``checkpoint`` reads safetensors, and ``orbax_checkpoint`` reads and writes Orbax.
- ``demo_model`` writes a small model with the weights of ``demo_weights``.
"""
