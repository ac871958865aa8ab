"""Tiny models with random weights and real file formats, made in a second: what tests serve, capture from and train on."""

from __future__ import annotations

import itertools
from pathlib import Path

CHAT_TEMPLATE = ("{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
                 "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}")


def tiny_llama(folder: Path, *, layers: int = 4, hidden: int = 64, vocab: int = 512, max_positions: int = 512, seed: int = 0) -> Path:
    """A Llama target with random weights, its tokenizer and chat template, as `from_pretrained` and vLLM read them; the same bytes for the same arguments."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tiny_tokenizer(vocab)
    # At least one weight above 1 MiB: vLLM's CPU build gives that one to oneDNN, which asks the kernel for AMX. With smaller ones alone nobody asks
    # (vLLM 0.32), and on a CPU with AMX its bf16 attention ends the engine with SIGILL on the first request.
    intermediate = 2**18 // hidden + 64
    config = LlamaConfig(vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=hidden // 32,
                         num_key_value_heads=hidden // 32, head_dim=32, max_position_embeddings=max_positions, tie_word_embeddings=False,
                         initializer_range=0.2,  # wide enough that greedy decoding meets few ties
                         bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


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


def chained_llama(folder: Path) -> Path:
    """A `tiny_llama` whose answers can be learned: every token has one likely successor, on a cycle through the whole vocabulary but its special tokens.

    The head's row of a token is the embedding of the token before it, and the layers add little. A draft learns it in seconds.
    """
    import torch
    from safetensors.torch import load_file, save_file

    tiny_llama(folder)
    tensors = load_file(folder / "model.safetensors")
    embedding, special = tensors["model.embed_tokens.weight"], 3
    cycle = torch.randperm(len(embedding) - special, generator=torch.Generator().manual_seed(1)) + special
    head = torch.zeros_like(embedding)
    head[cycle.roll(-1)] = embedding[cycle]
    tensors["lm_head.weight"] = head
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = tensors[name] * 0.003
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
