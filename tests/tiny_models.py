"""Tiny models with random weights and real file formats, made in a second: what tests serve, capture from and train on."""

from __future__ import annotations

import itertools
from pathlib import Path

CHAT_TEMPLATE = ("{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
                 "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}")


def tiny_llama(folder: Path, *, layers: int = 4, hidden: int = 64, vocab: int = 512, max_positions: int = 512, seed: int = 0) -> Path:
    """A Llama target with random weights, its tokenizer and chat template, as `from_pretrained` and vLLM read them; the same bytes for the same arguments."""
    from transformers import LlamaConfig, LlamaForCausalLM

    # At least one weight above 1 MiB: vLLM's CPU build gives that one to oneDNN, which asks the kernel for AMX. With smaller ones alone nobody asks
    # (vLLM 0.32), and on a CPU with AMX its bf16 attention ends the engine with SIGILL on the first request.
    sizes = dict(intermediate_size=2**18 // hidden + 64, num_attention_heads=hidden // 32, num_key_value_heads=hidden // 32, head_dim=32)
    return _save(folder, LlamaForCausalLM, LlamaConfig, vocab, seed, sizes | dict(hidden_size=hidden, num_hidden_layers=layers, max_position_embeddings=max_positions))


def tiny_tokenizer(vocab: int = 512):
    """A byte-level BPE tokenizer of exactly `vocab` tokens that can write any text, with `<|start|>`, `<|end|>` and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    syllables = [consonant + vowel for consonant, vowel in itertools.product("bcdfghjklmnpqrstvwxz", "aeiou")]
    corpus = [" ".join(first + second for second in syllables) for first in syllables]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=vocab, special_tokens=["<|pad|>", "<|start|>", "<|end|>"],
                                                              initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    assert tokenizer.get_vocab_size() == vocab, tokenizer.get_vocab_size()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|start|>", eos_token="<|end|>", pad_token="<|pad|>", chat_template=CHAT_TEMPLATE)


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
"""As DeepSeek-V3 and Kimi-K2 write it, but for the lengths."""


def tiny_deepseek(folder: Path, *, layers: int = 4, hidden: int = 64, vocab: int = 512, max_positions: int = 512, seed: int = 0) -> Path:
    """A target in DeepSeek-V3's layout, which is Kimi-K2's too, with random weights: MLA with a query bottleneck, one dense layer, then shared and routed experts.

    On CPU, vLLM 0.32 has kernels for one width of MLA's cache, DeepSeek's 512 + 64, and computes MLA right with YaRN alone: without, its rotary kernel
    takes the stride between heads for the one between tokens (RotaryEmbedding.forward_cpu), and states are off by half their norm.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = dict(q_lora_rank=48, kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32, num_attention_heads=2, num_key_value_heads=2,
                 intermediate_size=2**18 // hidden + 64, moe_intermediate_size=64, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1,
                 first_k_dense_replace=1, routed_scaling_factor=1.5, num_nextn_predict_layers=0, rope_theta=50000.0, rope_scaling=YARN,
                 topk_method="noaux_tc", scoring_func="sigmoid")
    return _save(folder, DeepseekV3ForCausalLM, DeepseekV3Config, vocab, seed, sizes | dict(hidden_size=hidden, num_hidden_layers=layers, max_position_embeddings=max_positions))


def tiny_minimax(folder: Path, *, layers: int = 4, hidden: int = 64, vocab: int = 512, max_positions: int = 512, seed: int = 0) -> Path:
    """A target in MiniMax-M2's layout with random weights: grouped attention that rotates half of each head, queries and keys normed over all heads, experts alone.

    One expert a token: vLLM 0.32 on CPU weighs experts by a softmax only, Hugging Face by the sigmoid of the real model, and of one expert both make 1.
    """
    from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

    # As many heads as make one weight larger than 1 MiB: see tiny_llama. As many key heads as vLLM's attention on CPU asks for with some tens of requests: it
    # takes the rows of a key head's query heads together, and only so many.
    sizes = dict(head_dim=128, rotary_dim=64, num_attention_heads=64, num_key_value_heads=8, intermediate_size=128, num_local_experts=8, num_experts_per_tok=1,
                 rope_theta=5e6, scoring_func="softmax", use_qk_norm=True, use_routing_bias=True, num_mtp_modules=0)
    return _save(folder, MiniMaxM2ForCausalLM, MiniMaxM2Config, vocab, seed, sizes | dict(hidden_size=hidden, num_hidden_layers=layers, max_position_embeddings=max_positions))


def tiny_qwen(folder: Path, *, layers: int = 4, hidden: int = 64, vocab: int = 512, max_positions: int = 512, seed: int = 0) -> Path:
    """A target in Qwen3's layout with random weights: Llama's, with queries and keys normed head by head, and heads wider than the hidden size gives."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = dict(intermediate_size=2**18 // hidden + 64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, rope_theta=1e6)
    return _save(folder, Qwen3ForCausalLM, Qwen3Config, vocab, seed, sizes | dict(hidden_size=hidden, num_hidden_layers=layers, max_position_embeddings=max_positions))


def _save(folder: Path, model_class, config_class, vocab: int, seed: int, sizes: dict) -> Path:
    import torch

    tokenizer = tiny_tokenizer(vocab)
    config = config_class(vocab_size=vocab, tie_word_embeddings=False,
                          initializer_range=0.2,  # wide enough that greedy decoding meets few ties
                          bos_token_id=tokenizer.bos_token_id,
                          eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **sizes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def chained(folder: Path) -> Path:
    """A tiny target, changed in place so that its answers can be learned: every token has one likely successor, on a cycle through the whole vocabulary but
    its special tokens.

    The head's row of a token is the embedding of the token before it, and the layers add little. A draft learns it in seconds.
    """
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    embedding, special = tensors["model.embed_tokens.weight"], 3
    cycle = torch.randperm(len(embedding) - special, generator=torch.Generator().manual_seed(1)) + special
    head = torch.zeros_like(embedding)
    head[cycle.roll(-1)] = embedding[cycle]
    tensors["lm_head.weight"] = head
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight")):
            tensors[name] = tensors[name] * 0.003
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def chained_llama(folder: Path) -> Path:
    return chained(tiny_llama(folder))
