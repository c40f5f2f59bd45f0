"""Models of Hugging Face that grow by a copy of one of their own layers: what is delivered, does it come back from its files, and
does it generate?

    python -m experiments.copied_families

Two layers each, or stages of two and three, built from config; a plan puts a copy behind one of them, nine epochs of two steps. Compared bit for bit with the
model that grew: what is delivered; what `from_pretrained` reads after `save_pretrained`; and texts generated with a cache of keys
and values with those generated without. Writes experiments/results/copied_families.json.
"""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import esper
from experiments.shared import parser, write

TOKENS = torch.randint(2, 50, (4, 12), generator=torch.Generator().manual_seed(0))
LABELS, PICTURES = torch.tensor([0, 1, 0, 1]), torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
SPEAK, CLASSIFY = {"input_ids": TOKENS, "labels": TOKENS, "use_cache": False}, {"input_ids": TOKENS, "labels": LABELS}
ENDS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": None}
GPT2 = {"vocab_size": 50, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, **ENDS}
LLAMA = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2, "max_position_embeddings": 64, **ENDS}
EYES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 16, "patch_size": 8}
LOOK, STAGES = {"pixel_values": PICTURES, "labels": LABELS}, {"hidden_sizes": [4, 8], "depths": [2, 3]}
T5 = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
BART = {"vocab_size": 50, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0,
        "eos_token_id": 1, "decoder_start_token_id": 0, "forced_eos_token_id": None}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "GPT-2": ("GPT2LMHeadModel", GPT2, SPEAK, "transformer.h.0"),
    "GPT-2, attention scaled by the layer's number": ("GPT2LMHeadModel", GPT2 | {"scale_attn_by_inverse_layer_idx": True}, SPEAK, "transformer.h.0"),
    "GPT-Neo": ("GPTNeoForCausalLM", {"vocab_size": 50, "hidden_size": 16, "num_layers": 2, "attention_types": [[["global", "local"], 1]],
                                      "num_heads": 2, "window_size": 4, "max_position_embeddings": 64, **ENDS}, SPEAK, "transformer.h.0"),
    "BLOOM": ("BloomForCausalLM", {"vocab_size": 50, "hidden_size": 16, "n_layer": 2, "n_head": 2, **ENDS}, SPEAK, "transformer.h.0"),
    "OPT": ("OPTForCausalLM", {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32,
                               "max_position_embeddings": 64, "word_embed_proj_dim": 16, **ENDS}, SPEAK, "model.decoder.layers.0"),
    "Llama": ("LlamaForCausalLM", LLAMA, SPEAK, "model.layers.0"),
    "Mistral": ("MistralForCausalLM", LLAMA | {"sliding_window": 4}, SPEAK, "model.layers.1"),
    "Qwen2": ("Qwen2ForCausalLM", LLAMA | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, SPEAK, "model.layers.0"),
    "Gemma 2": ("Gemma2ForCausalLM", LLAMA | {"sliding_window": 4, "head_dim": 8}, SPEAK, "model.layers.0"),
    "SmolLM3": ("SmolLM3ForCausalLM", LLAMA | {"no_rope_layer_interval": 2}, SPEAK, "model.layers.0"),
    "Mixtral": ("MixtralForCausalLM", LLAMA | {"num_local_experts": 2}, SPEAK, "model.layers.0"),
    "Qwen2-MoE, experts in every second layer": ("Qwen2MoeForCausalLM", LLAMA | {
        "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "decoder_sparse_step": 2},
        SPEAK, "model.layers.0"),
    "Mamba": ("MambaForCausalLM", {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, **ENDS}, SPEAK, "backbone.layers.0"),
    "BERT": ("BertForSequenceClassification", LLAMA, CLASSIFY, "bert.encoder.layer.0"),
    "ViT": ("ViTForImageClassification", EYES, LOOK, "vit.layers.0"),
    "ResNet": ("ResNetForImageClassification", STAGES | {"embedding_size": 4, "layer_type": "basic"}, LOOK, "resnet.encoder.stages.1.layers.1"),
    "RegNet": ("RegNetForImageClassification", STAGES | {"embedding_size": 4, "groups_width": 4}, LOOK, "regnet.encoder.stages.1.layers.1"),
    "ConvNeXt": ("ConvNextForImageClassification", STAGES | {"patch_size": 1, "num_stages": 2}, LOOK, "convnext.encoder.stages.1.layers.0"),
    "Swin": ("SwinForImageClassification", {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2},
             LOOK, "swin.encoder.layers.1.blocks.0"),
    "T5, encoder": ("T5ForConditionalGeneration", T5, SPEAK, "encoder.block.1"),
    "T5, decoder": ("T5ForConditionalGeneration", T5, SPEAK, "decoder.block.1"),
    "BART, encoder": ("BartForConditionalGeneration", BART, SPEAK, "model.encoder.layers.0"),
    "BART, decoder": ("BartForConditionalGeneration", BART, SPEAK, "model.decoder.layers.0"),
}


def built(name: str, settings: dict[str, Any]) -> nn.Module:
    kind = getattr(hf, name)
    torch.manual_seed(0)
    return kind(kind.config_class(**settings))


def logits(net: nn.Module, batch: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return net.eval()(**batch).logits


def tried(name: str, settings: dict[str, Any], batch: dict[str, Any], slot: str) -> dict[str, Any]:
    net = built(name, settings)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    growing = esper.attach(net, optimizer, example=batch, slots=[slot], blueprints=["copy"], controller={slot: "copy"}, epochs=9)
    for _ in range(9):
        for _ in range(2):
            optimizer.zero_grad()
            net.train()(**batch).loss.backward()
            optimizer.step()
        growing.end_epoch(lambda: -float(net.eval()(**batch).loss.detach()))
    wanted = logits(net, batch)
    better = growing.deliver()
    own = not any(type(module).__module__.startswith("esper") for module in better.modules())
    told: dict[str, Any] = {"own class": own, "same": torch.equal(logits(better, batch), wanted)}
    with tempfile.TemporaryDirectory() as folder:
        if own:
            better.save_pretrained(folder)
            told["from its files"] = torch.equal(logits(type(better).from_pretrained(folder), batch), wanted)
        if own and hasattr(better, "generate") and "use_cache" in batch:
            say: Callable[[bool], Tensor] = lambda cache: better.generate(TOKENS, max_new_tokens=12, do_sample=False, use_cache=cache)  # noqa: E731
            told["with a cache"] = torch.equal(say(True), say(False))
    print(name, slot, told, flush=True)
    return told


def main() -> None:
    options = parser(__doc__).parse_args()
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    torch.set_num_threads(1)
    write(options, "copied_families", {"transformers": hf.__version__, "models": {title: tried(*row) for title, row in MODELS.items()}})


if __name__ == "__main__":
    main()
