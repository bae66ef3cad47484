"""Tiny models of the architectures of ``transformers``, and what the default policy has to find in each.

Weights are random, nothing is downloaded. Sizes that could pass for one another are different, except that tables of
positions are as long as MLPs are wide: that makes no MLP an output head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY, DIM, HIDDEN, HEADS = 2, 16, 128, 32, 64, 2


@dataclasses.dataclass(frozen=True)
class Architecture:
    """``model`` is the class, made from a config with ``settings``. By hand from its code: ``blocks``, the list whose
    ends the policy counts, how long it is, and ``head``, the module that gives the logits."""

    model: str
    blocks: str
    count: int
    head: str
    inputs: Callable[[], dict[str, Tensor]]
    settings: Mapping[str, Any]

    def build(self) -> nn.Module:
        """The model in bfloat16, in training, with the same weights at every call."""
        transformers = pytest.importorskip("transformers", reason="the models of the zoo need the extra [zoo]")
        torch.manual_seed(0)
        kind = getattr(transformers, self.model)
        return kind(kind.config_class(**self.settings)).to(torch.bfloat16).train()


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def text() -> dict[str, Tensor]:
    return {"input_ids": tokens(), "labels": tokens()}


def speech() -> dict[str, Tensor]:
    return {"input_features": _noise(BATCH, 16, 2 * LENGTH), "labels": tokens()}


def images() -> dict[str, Tensor]:
    return {"pixel_values": _noise(BATCH, 3, 32, 32), "labels": torch.tensor([0, 1])}


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = {
    "hidden_size": DIM,
    "intermediate_size": HIDDEN,
    "num_attention_heads": HEADS,
    "max_position_embeddings": HIDDEN,
}
DECODER = {**ENCODER, "num_key_value_heads": HEADS, "use_cache": False}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MAMBA = {"n_groups": 1, "chunk_size": 8}


def _text_model(
    model: str, count: int = 4, blocks: str = "model.layers", head: str = "lm_head", **settings: Any
) -> Architecture:
    settings = {"vocab_size": VOCABULARY, "num_hidden_layers": count, **SPECIAL_TOKENS, **settings}
    return Architecture(model, blocks, count, head, text, settings)


ZOO: dict[str, Architecture] = {
    "Llama": _text_model("LlamaForCausalLM", count=16, **DECODER),  # as many as have a first block in bf16
    "Qwen3": _text_model("Qwen3ForCausalLM", head_dim=16, **DECODER),
    "Qwen3-MoE": _text_model("Qwen3MoeForCausalLM", head_dim=16, num_experts=4, **EXPERTS, **DECODER),
    "Mistral": _text_model("MistralForCausalLM", head_dim=16, sliding_window=8, **DECODER),
    "Gemma3": _text_model("Gemma3ForCausalLM", head_dim=16, sliding_window=8, **DECODER),
    "Phi3": _text_model("Phi3ForCausalLM", **DECODER),
    "Granite": _text_model("GraniteForCausalLM", **DECODER),
    "GPT-2": _text_model(
        "GPT2LMHeadModel",
        blocks="transformer.h",
        n_embd=DIM,
        n_head=HEADS,
        n_inner=HIDDEN,
        n_positions=HIDDEN,
        use_cache=False,
    ),
    "GPT-NeoX": _text_model("GPTNeoXForCausalLM", blocks="gpt_neox.layers", **ENCODER, use_cache=False),
    "OPT": _text_model(
        "OPTForCausalLM",
        blocks="model.decoder.layers",
        ffn_dim=HIDDEN,
        word_embed_proj_dim=DIM,
        **ENCODER,
        use_cache=False,
    ),
    "BERT": _text_model("BertForMaskedLM", blocks="bert.encoder.layer", head="cls.predictions.decoder", **ENCODER),
    "ModernBERT": _text_model(
        "ModernBertForMaskedLM", head="decoder", cls_token_id=1, sep_token_id=2, local_attention=8, **ENCODER
    ),
    "T5": Architecture(
        "T5ForConditionalGeneration",
        "decoder.block",
        4,
        "lm_head",
        text,
        {
            "vocab_size": VOCABULARY,
            "d_model": DIM,
            "d_kv": 16,
            "d_ff": HIDDEN,
            "num_layers": 2,
            "num_decoder_layers": 4,
            "num_heads": HEADS,
            "decoder_start_token_id": 0,
            "use_cache": False,
        },
    ),
    "Whisper": Architecture(
        "WhisperForConditionalGeneration",
        "model.decoder.layers",
        4,
        "proj_out",
        speech,
        {
            "vocab_size": VOCABULARY,
            "num_mel_bins": 16,
            "d_model": DIM,
            "encoder_layers": 2,
            "decoder_layers": 4,
            "encoder_attention_heads": HEADS,
            "decoder_attention_heads": HEADS,
            "encoder_ffn_dim": HIDDEN,
            "decoder_ffn_dim": HIDDEN,
            "max_source_positions": LENGTH,
            "max_target_positions": HIDDEN,
            "decoder_start_token_id": 1,
            "begin_suppress_tokens": None,
            "use_cache": False,
            **SPECIAL_TOKENS,
        },
    ),
    "ViT": Architecture(
        "ViTForImageClassification",
        "vit.layers",
        4,
        "classifier",
        images,
        {**ENCODER, "num_hidden_layers": 4, "image_size": 32, "patch_size": 8, "num_labels": 48},
    ),
    "Mamba2": _text_model(
        "Mamba2ForCausalLM",
        blocks="backbone.layers",
        hidden_size=DIM,
        num_heads=4,
        head_dim=16,
        state_size=16,
        use_cache=False,
        **MAMBA,
    ),
    "NemotronH": _text_model(
        "NemotronHForCausalLM",
        layers_block_type=["mamba", "moe", "attention", "mamba"],
        head_dim=16,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_routed_experts=4,
        moe_shared_expert_intermediate_size=32,
        **EXPERTS,
        **MAMBA,
        **DECODER,
    ),
    "DeepseekV3": _text_model(
        "DeepseekV3ForCausalLM",
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        **EXPERTS,
        **DECODER,
    ),
}
