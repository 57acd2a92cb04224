"""Architectures of many libraries, tiny and made from configurations: a table of how to build one, and its inputs.

`ROWS` has the architectures by name, `LIBRARY` the library of each. A row's `build` returns a module whose parameters
are random and the same in every call; its `inputs` are drawn from a generator. `loss_of` makes a number of any output.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

F64 = torch.float64
Inputs = dict[str, Any] | tuple[Any, ...]


@dataclass(frozen=True)
class Row:
    """An architecture.

    Attributes:
        build: makes the module. It imports its library, which need not be installed.
        inputs: the arguments of a call, drawn from a generator: a dict of keywords, or a tuple.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator], Inputs]


ROWS: dict[str, Row] = {}
LIBRARY: dict[str, str] = {}


def seed(number: int) -> None:
    """Seed the generators of Python, NumPy and torch: some libraries drop layers by `random.random()`."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def built(name: str) -> nn.Module:
    """The architecture in float64, in training mode, with no constant parameter: zeros would hide what is behind."""
    seed(0)
    wide = {torch.float32: F64, torch.complex64: torch.complex128}
    model = ROWS[name].build().train()
    # `model.double()` would leave the real part of complex parameters.
    model._apply(lambda x: x.to(wide.get(x.dtype, x.dtype)))
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and p.numel() and bool((p == p.flatten()[0]).all()):
                p += 0.1 * torch.randn(p.shape, generator=draw, dtype=p.dtype)
    return model


def inputs(name: str, number: int) -> Inputs:
    return ROWS[name].inputs(torch.Generator().manual_seed(1000 + number))


def called(model: Any, given: Inputs) -> Any:
    return model(**given) if isinstance(given, dict) else model(*given)


def tensors_in(x: Any) -> Iterator[Tensor]:
    """The floating-point and complex tensors of an output, of any kind that libraries return."""
    if isinstance(x, Tensor):
        if x.is_complex():
            yield torch.view_as_real(x)
        elif x.is_floating_point():
            yield x
    elif isinstance(x, Mapping):
        for value in x.values():
            yield from tensors_in(value)
    elif isinstance(x, list | tuple):
        for value in x:
            yield from tensors_in(value)


def loss_of(output: Any) -> Tensor:
    """A number that depends on every element of an output, and on each in another way."""
    found = []
    for x in tensors_in(output):
        flat = x.reshape(-1).to(F64)
        weights = torch.cos(torch.arange(len(flat), dtype=F64))
        found.append((flat * weights).mean() + flat.square().mean() / 2)
    return torch.stack(found).sum()


# ---- inputs ----


def tokens(*names: str, length: int = 12, batch: int = 2, vocabulary: int = 61) -> Callable[[torch.Generator], Inputs]:
    def draw(g: torch.Generator) -> Inputs:
        return {k: torch.randint(3, vocabulary, (batch, length), generator=g) for k in names or ("input_ids",)}

    return draw


def normal(**shapes: tuple[int, ...]) -> Callable[[torch.Generator], Inputs]:
    return lambda g: {k: torch.randn(s, generator=g, dtype=F64) for k, s in shapes.items()}


def positional(*shapes: tuple[int, ...]) -> Callable[[torch.Generator], Inputs]:
    return lambda g: tuple(torch.randn(s, generator=g, dtype=F64) for s in shapes)


def joined(*parts: Callable[[torch.Generator], Inputs], **fixed: Any) -> Callable[[torch.Generator], Inputs]:
    def draw(g: torch.Generator) -> Inputs:
        found: dict[str, Any] = {}
        for part in parts:
            found |= part(g)  # type: ignore[arg-type]
        return found | fixed

    return draw


def images(size: int = 16, channels: int = 3, batch: int = 2, name: str = "pixel_values") -> Any:
    return normal(**{name: (batch, channels, size, size)})


def library(name: str) -> Callable[..., Any]:
    """Rows of a library: `add(name, build, inputs)`."""

    def add(row: str, build: Callable[[], nn.Module], inputs: Callable[[torch.Generator], Inputs]) -> None:
        assert row not in ROWS, row
        ROWS[row], LIBRARY[row] = Row(build, inputs), name

    return add


def of(module: str, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


# ---- transformers ----

TEXT = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "head_dim": 4, "use_cache": False}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2}
ENCODER = {k: v for k, v in TEXT.items() if k not in ("head_dim", "num_key_value_heads", "use_cache")}
# Names of an encoder and a decoder.
BOTH = {"vocab_size": 61, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
BOTH |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64}
BOTH |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "use_cache": False}
T5 = {"vocab_size": 61, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "pad_token_id": 0}
T5 |= {"decoder_start_token_id": 0, "use_cache": False}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION |= {"image_size": 16, "patch_size": 8, "num_labels": 5, "num_channels": 3}
STAGES = {"image_size": 32, "num_channels": 3, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5}
AUDIO = {k: v for k, v in ENCODER.items() if k != "max_position_embeddings"} | {
    **{"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.3},
}


def transformer(name: str, **config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        cls = of("transformers", name)
        made = cls.config_class(**config)
        # Torch's grouped products have no float64.
        made._attn_implementation = made._experts_implementation = "eager"
        if hasattr(made, "router_dtype"):
            # Routers cast their parameters to it in every call, and a float64 is not allowed as an argument.
            made.__dict__["router_dtype"] = "float64"
        return cls(made)

    return build


def add_transformers() -> None:
    add = library("transformers")

    def text(name: str, base: Mapping[str, Any] = TEXT, given: Any = None, **config: Any) -> None:
        add(name, transformer(name, **{**base, **config}), given or tokens())

    # Decoders.
    text("LlamaForCausalLM", tie_word_embeddings=True)
    text("MistralForCausalLM", sliding_window=6)
    text("Qwen2ForCausalLM")
    text("Qwen3ForCausalLM")
    text("GemmaForCausalLM")
    text("Gemma2ForCausalLM", query_pre_attn_scalar=4)
    text("Gemma3ForCausalLM", query_pre_attn_scalar=4)
    text("PhiForCausalLM")
    text("Phi3ForCausalLM")
    text("StableLmForCausalLM")
    text("Starcoder2ForCausalLM")
    text("CohereForCausalLM")
    text("Cohere2ForCausalLM")
    text("OlmoForCausalLM")
    text("Olmo2ForCausalLM")
    text("Olmo3ForCausalLM")
    text("GraniteForCausalLM")
    text("NemotronForCausalLM")
    text("PersimmonForCausalLM")
    text("GlmForCausalLM")
    text("Glm4ForCausalLM")
    text("HeliumForCausalLM")
    text("SmolLM3ForCausalLM")
    text("ArceeForCausalLM")
    text("DiffLlamaForCausalLM")
    text("Ernie4_5ForCausalLM")
    text("Exaone4ForCausalLM")
    text("SeedOssForCausalLM")
    text("ApertusForCausalLM")
    moe = {"num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    text("MixtralForCausalLM", **moe)
    text("Qwen2MoeForCausalLM", **moe, shared_expert_intermediate_size=16)
    text("Qwen3MoeForCausalLM", **moe)
    text("OlmoeForCausalLM", **moe)
    text("GraniteMoeForCausalLM", **moe)
    text("PhimoeForCausalLM", **moe)
    text("MiniMaxForCausalLM", **moe, layer_types=["full_attention", "linear_attention"], block_size=4)
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    moe |= {"num_local_experts": 8}
    latent |= {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
    text("DeepseekV2ForCausalLM", **moe, **latent, num_key_value_heads=4)
    text("DeepseekV3ForCausalLM", **moe, **latent, num_key_value_heads=4)
    text("GPT2LMHeadModel", {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64})
    text("GPTNeoXForCausalLM")
    text("GPTJForCausalLM", {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 4})
    text("GPTNeoForCausalLM", TEXT, attention_types=[[["global", "local"], 1]], num_layers=2, num_heads=4)
    text("GPTBigCodeForCausalLM", {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64})
    text("CodeGenForCausalLM", {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 4, "rotary_dim": 4})
    text("OpenAIGPTLMHeadModel", {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64})
    text("OPTForCausalLM", {**TEXT, "ffn_dim": 32, "word_embed_proj_dim": 8})
    text("BloomForCausalLM", {"vocab_size": 61, "hidden_size": 16, "n_layer": 2, "n_head": 4})
    text("FalconForCausalLM", ENCODER)
    text("MptForCausalLM", {"vocab_size": 61, "d_model": 16, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2})
    text("CTRLLMHeadModel", {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 4, "dff": 32, "n_positions": 64})
    text("BioGptForCausalLM")
    text("XLNetLMHeadModel", {"vocab_size": 61, "d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 32})
    text("RwkvForCausalLM", {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "attention_hidden_size": 16})
    state = {"state_size": 4, "conv_kernel": 3, "expand": 2, "time_step_rank": 2, "num_heads": 8, "n_groups": 2}
    text("MambaForCausalLM", **state)
    text("FalconMambaForCausalLM", **state)
    text("Mamba2ForCausalLM", **{**state, "head_dim": 4, "chunk_size": 4})
    text("RecurrentGemmaForCausalLM", num_hidden_layers=3, lru_width=16, attention_window_size=8)
    hybrid = {"mamba_d_state": 4, "mamba_d_conv": 3, "mamba_expand": 2, "mamba_dt_rank": 2, "use_mamba_kernels": False}
    text("JambaForCausalLM", **moe, **hybrid, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2)
    text("Lfm2ForCausalLM", layer_types=["conv", "full_attention"], conv_L_cache=3)

    # Encoders.
    for name in (
        *("BertForMaskedLM", "RobertaForMaskedLM", "AlbertForMaskedLM", "ElectraForMaskedLM", "MPNetForMaskedLM"),
        *("CamembertForMaskedLM", "RemBertForMaskedLM", "RoFormerForMaskedLM", "ErnieForMaskedLM", "IBertForMaskedLM"),
        *("MegatronBertForMaskedLM", "ConvBertForMaskedLM", "SqueezeBertForMaskedLM", "LayoutLMForMaskedLM"),
        *("XLMRobertaForMaskedLM", "BertGenerationEncoder", "VisualBertModel", "NystromformerForMaskedLM"),
        *("DebertaForMaskedLM", "DebertaV2ForMaskedLM", "EsmForMaskedLM", "ModernBertForMaskedLM", "FNetForMaskedLM"),
        *("Data2VecTextForMaskedLM", "XmodForMaskedLM", "SplinterModel", "YosoForMaskedLM"),
    ):
        text(name, ENCODER, **MORE.get(name, {}))
    text("DistilBertForMaskedLM", {"vocab_size": 61, "dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 4})
    text("MobileBertForMaskedLM", ENCODER, embedding_size=8, intra_bottleneck_size=8, true_hidden_size=8)
    text(
        "FunnelForMaskedLM",
        {"vocab_size": 61, "d_model": 16, "d_inner": 32, "n_head": 4, "d_head": 4},
        block_sizes=[1, 1],
    )
    text("XLMWithLMHeadModel", {"vocab_size": 61, "emb_dim": 16, "n_layers": 2, "n_heads": 4, "pad_index": 0})
    text("FlaubertWithLMHeadModel", {"vocab_size": 61, "emb_dim": 16, "n_layers": 2, "n_heads": 4}, layerdrop=0.3)
    text("LongformerForMaskedLM", ENCODER, attention_window=4)
    text("BigBirdForMaskedLM", ENCODER, attention_type="original_full")
    text("ReformerModel", ENCODER, given=tokens(length=16), **MORE["ReformerModel"])
    text("LukeForMaskedLM", ENCODER, entity_vocab_size=11, entity_emb_size=8)

    # Encoders with decoders.
    pairs = tokens("input_ids", "decoder_input_ids")
    text("T5ForConditionalGeneration", T5, pairs)
    text("MT5ForConditionalGeneration", T5, pairs)
    text("UMT5ForConditionalGeneration", T5, pairs)
    text("LongT5ForConditionalGeneration", T5, pairs, local_radius=3)
    text(
        "SwitchTransformersForConditionalGeneration",
        T5,
        pairs,
        num_experts=3,
        expert_capacity=12,
        num_sparse_encoder_layers=1,
    )
    for name in (
        *("BartForConditionalGeneration", "MBartForConditionalGeneration", "PegasusForConditionalGeneration"),
        *("MarianMTModel", "BlenderbotForConditionalGeneration", "M2M100ForConditionalGeneration"),
        *("BlenderbotSmallForConditionalGeneration", "PLBartForConditionalGeneration", "MvpForConditionalGeneration"),
        *("PegasusXForConditionalGeneration", "LEDForConditionalGeneration", "NllbMoeForConditionalGeneration"),
    ):
        text(name, BOTH, pairs, **MORE.get(name, {}))
    text(
        "ProphetNetForConditionalGeneration",
        {k: v for k, v in ENCODER.items() if k != "num_hidden_layers"},
        pairs,
        **MORE["ProphetNetForConditionalGeneration"],
    )

    # Images and films.
    for name in (
        *("ViTForImageClassification", "DeiTForImageClassification", "Dinov2ForImageClassification"),
        *("Data2VecVisionForImageClassification", "BeitForImageClassification", "ViTMSNForImageClassification"),
        *("IJepaForImageClassification", "SiglipVisionModel", "CLIPVisionModel", "YolosForObjectDetection"),
        *("Dinov2WithRegistersForImageClassification", "ViTMAEForPreTraining", "DPTForDepthEstimation"),
        *("DINOv3ViTModel",),
    ):
        text(name, VISION, images(), **MORE.get(name, {}))
    swin = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4}
    text("SwinForImageClassification", swin, images(), num_labels=5)
    text("Swinv2ForImageClassification", swin, images(), num_labels=5)
    text(
        "Swin2SRForImageSuperResolution",
        {**swin, "embed_dim": 16, "patch_size": 1, "window_size": 8, "upsampler": "pixelshuffle"},
        images(),
    )
    text("FocalNetForImageClassification", swin, images(), num_labels=5)
    text("DonutSwinModel", swin, images())
    for name in (
        *("ConvNextForImageClassification", "ConvNextV2ForImageClassification", "ResNetForImageClassification"),
        *("RegNetForImageClassification", "BitForImageClassification", "PoolFormerForImageClassification"),
        *("SegformerForImageClassification", "PvtForImageClassification", "PvtV2ForImageClassification"),
        *("SwiftFormerForImageClassification", "GLPNForDepthEstimation"),
    ):
        text(name, STAGES, images(32), **MORE.get(name, {}))
    text("MobileNetV1ForImageClassification", {"depth_multiplier": 0.25, "num_labels": 5}, images(32))
    text("MobileNetV2ForImageClassification", {"depth_multiplier": 0.25, "num_labels": 5}, images(32))
    text("EfficientNetForImageClassification", MORE["EfficientNetForImageClassification"], images(32))
    text("MobileViTForImageClassification", MORE["MobileViTForImageClassification"], images(32))
    text("LevitForImageClassification", MORE["LevitForImageClassification"], images(32))
    text("HieraForImageClassification", MORE["HieraForImageClassification"], images(32))
    film = {**VISION, "num_frames": 2, "tubelet_size": [2, 8, 8]}
    films = normal(pixel_values=(2, 2, 3, 16, 16))
    text("VideoMAEForVideoClassification", {**film, "tubelet_size": 2}, films)
    text("VivitForVideoClassification", film, films)
    text("TimesformerForVideoClassification", film, films)

    # Sounds.
    sound = normal(input_values=(2, 200))
    for name in (
        *("Wav2Vec2ForCTC", "HubertForCTC", "WavLMForCTC", "UniSpeechForCTC", "UniSpeechSatForCTC", "SEWForCTC"),
        *("Data2VecAudioForCTC", "Wav2Vec2ConformerForCTC"),
    ):
        text(name, AUDIO, sound, **MORE.get(name, {}))
    text(
        "WhisperForConditionalGeneration",
        {**BOTH, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 20},
        joined(normal(input_features=(2, 8, 20)), tokens("decoder_input_ids", length=6)),
    )
    text(
        "Speech2TextForConditionalGeneration",
        {**BOTH, **MORE["Speech2TextForConditionalGeneration"]},
        joined(normal(input_features=(2, 20, 8)), tokens("decoder_input_ids", length=6)),
    )
    text(
        "ASTForAudioClassification",
        {**VISION, "max_length": 24, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8},
        normal(input_values=(2, 24, 16)),
    )
    text("EncodecModel", MORE["EncodecModel"], normal(input_values=(2, 1, 64)))
    text("DacModel", MORE["DacModel"], normal(input_values=(2, 1, 64)))

    # Texts with images.
    two = {"text_config": dict(ENCODER), "vision_config": dict(VISION), "projection_dim": 8}
    seen = joined(tokens(), images())
    text("CLIPModel", {**two, "text_config": {**ENCODER, "eos_token_id": 60}}, seen)
    text("SiglipModel", {**two, "text_config": {**ENCODER, "projection_size": 16}}, seen)
    text("AltCLIPModel", {**two, "text_config": {**ENCODER, "project_dim": 16}}, seen)
    text("ChineseCLIPModel", two, seen)
    text("CLIPSegModel", {**two, "text_config": {**ENCODER, "eos_token_id": 60}}, seen)
    text("BlipModel", {**two, "text_config": {**ENCODER, "encoder_hidden_size": 16}}, seen)
    text("GroupViTModel", {**two, **MORE["GroupViTModel"]}, seen)
    text(
        "ViltModel",
        {**ENCODER, **VISION},
        joined(tokens(), images(), lambda g: {"pixel_mask": torch.ones(2, 16, 16, dtype=torch.long)}),
    )
    text("Owlv2Model", {**two, "text_config": {**ENCODER, "max_position_embeddings": 12}}, seen)

    # Series, and the rest.
    series = {
        "prediction_length": 4,
        "context_length": 12,
        "lags_sequence": [1, 2],
        "num_time_features": 1,
        "d_model": 16,
    }
    series |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    past = normal(
        past_values=(2, 14), past_time_features=(2, 14, 1), future_values=(2, 4), future_time_features=(2, 4, 1)
    )
    past = joined(past, lambda g: {"past_observed_mask": torch.ones(2, 14, dtype=F64)})
    text("TimeSeriesTransformerForPrediction", series, past)
    text("InformerForPrediction", series, past)
    patches = {
        "context_length": 16,
        "prediction_length": 4,
        "patch_length": 4,
        "patch_stride": 4,
        "num_input_channels": 2,
    }
    patches |= {"d_model": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 16}
    text("PatchTSTForPrediction", patches, normal(past_values=(2, 16, 2)))
    text("PatchTSMixerForPrediction", patches, normal(past_values=(2, 16, 2)))
    text(
        "DecisionTransformerModel",
        {"state_dim": 3, "act_dim": 2, "hidden_size": 16, "n_layer": 2, "n_head": 4, "max_ep_len": 20},
        decisions,
    )
    text(
        "PerceiverModel",
        {
            "d_model": 16,
            "d_latents": 16,
            "num_latents": 6,
            "num_blocks": 1,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 2,
            "num_cross_attention_heads": 2,
        },
        normal(inputs=(2, 10, 16)),
    )


def decisions(g: torch.Generator) -> Inputs:
    shapes = {"states": (2, 5, 3), "actions": (2, 5, 2), "rewards": (2, 5, 1), "returns_to_go": (2, 5, 1)}
    found: dict[str, Any] = {k: torch.randn(s, generator=g, dtype=F64) for k, s in shapes.items()}
    return found | {"timesteps": torch.arange(5).expand(2, 5), "attention_mask": torch.ones(2, 5)}


# What some configurations need beside the usual names.
MORE: dict[str, dict[str, Any]] = {
    "ReformerModel": {
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [8, 8],
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 4,
        "feed_forward_size": 32,
        **dict.fromkeys(
            ("hidden_dropout_prob", "local_attention_probs_dropout_prob", "lsh_attention_probs_dropout_prob"), 0.0
        ),
        "attention_head_size": 4,
    },
    "ProphetNetForConditionalGeneration": {
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
        "ngram": 2,
        "decoder_start_token_id": 1,
    },
    "SqueezeBertForMaskedLM": {"embedding_size": 16},
    "XmodForMaskedLM": {"default_language": "en_XX"},
    "FNetForMaskedLM": {"tpu_short_seq_length": 12},
    "ModernBertForMaskedLM": {
        "global_attn_every_n_layers": 2,
        "local_attention": 4,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "RemBertForMaskedLM": {"input_embedding_size": 8, "output_embedding_size": 8},
    "EsmForMaskedLM": {"position_embedding_type": "rotary", "mask_token_id": 3},
    "VisualBertModel": {"visual_embedding_dim": 8},
    "NllbMoeForConditionalGeneration": {
        "num_experts": 4,
        "expert_capacity": 24,
        "encoder_sparse_step": 2,
        "decoder_sparse_step": 2,
    },
    "LEDForConditionalGeneration": {
        "attention_window": 4,
        "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64,
    },
    "PegasusXForConditionalGeneration": {"block_size": 4, "num_global_tokens": 2},
    "ViTMAEForPreTraining": {
        "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 4,
        "decoder_intermediate_size": 32,
    },
    "BeitForImageClassification": {"use_relative_position_bias": True, "layer_scale_init_value": 0.1},
    "DPTForDepthEstimation": {
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [8, 8, 8, 8],
        "fusion_hidden_size": 8,
        "reassemble_factors": [1, 1, 1, 1],
    },
    "YolosForObjectDetection": {"image_size": [16, 16], "num_detection_tokens": 5},
    "ConvNextForImageClassification": {"num_stages": 2},
    "ConvNextV2ForImageClassification": {"num_stages": 2},
    "ResNetForImageClassification": {"embedding_size": 8},
    "RegNetForImageClassification": {"embedding_size": 8, "groups_width": 4},
    "BitForImageClassification": {"embedding_size": 8, "num_groups": 4},
    "PoolFormerForImageClassification": {
        "num_encoder_blocks": 2,
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "padding": [2, 1],
    },
    "SegformerForImageClassification": {
        "num_encoder_blocks": 2,
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "sr_ratios": [2, 1],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
    },
    "PvtForImageClassification": {
        "num_encoder_blocks": 2,
        "patch_sizes": [4, 2],
        "strides": [4, 2],
        "sequence_reduction_ratios": [2, 1],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
    },
    "PvtV2ForImageClassification": {
        "num_encoder_blocks": 2,
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "sr_ratios": [2, 1],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
    },
    "SwiftFormerForImageClassification": {
        "embed_dims": [8, 16],
        "depths": [1, 1],
        "downsamples": [True, True],
        "mlp_ratio": 2,
    },
    "GLPNForDepthEstimation": {
        "num_encoder_blocks": 2,
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "sr_ratios": [2, 1],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
        "decoder_hidden_size": 8,
    },
    "EfficientNetForImageClassification": {
        "image_size": 32,
        "width_coefficient": 0.25,
        "depth_coefficient": 0.3,
        "num_labels": 5,
        "hidden_dim": 320,
        "dropout_rate": 0.1,
    },
    "MobileViTForImageClassification": {
        "image_size": 32,
        "patch_size": 2,
        "hidden_sizes": [8, 12, 16],
        "neck_hidden_sizes": [4, 8, 12, 16, 16, 16, 24],
        "num_attention_heads": 2,
        "num_labels": 5,
    },
    "LevitForImageClassification": {
        "image_size": 32,
        "hidden_sizes": [16, 24, 32],
        "num_attention_heads": [2, 2, 2],
        "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
        "num_labels": 5,
        "kernel_size": 3,
        "stride": 2,
        "patch_size": 16,
    },
    "HieraForImageClassification": {
        "image_size": [32, 32],
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "patch_stride": [4, 4],
        "masked_unit_size": [4, 4],
        "query_stride": [2, 2],
        "num_query_pool": 1,
        "num_labels": 5,
    },
    "EncodecModel": {
        "target_bandwidths": [1.5],
        "sampling_rate": 100,
        "num_filters": 2,
        "hidden_size": 8,
        "codebook_size": 16,
        "codebook_dim": 8,
        "upsampling_ratios": [2, 2],
        "num_lstm_layers": 1,
        "norm_type": "weight_norm",
    },
    "DacModel": {
        "encoder_hidden_size": 4,
        "downsampling_ratios": [2, 2],
        "decoder_hidden_size": 8,
        "n_codebooks": 2,
        "codebook_size": 16,
        "codebook_dim": 4,
        "upsampling_ratios": [2, 2],
        "hidden_size": 16,
        "sampling_rate": 100,
    },
    "SEWForCTC": {"squeeze_factor": 1},
    "UniSpeechSatForCTC": {"xvector_output_dim": 8},
    "Speech2TextForConditionalGeneration": {
        "num_conv_layers": 1,
        "conv_kernel_sizes": (3,),
        "conv_channels": 16,
        "input_feat_per_channel": 8,
        "max_source_positions": 20,
        "max_target_positions": 20,
    },
    "GroupViTModel": {
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 32,
            "depths": [1, 1],
            "num_hidden_layers": 2,
            "num_group_tokens": [4, 0],
            "num_output_groups": [2, 2],
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
        },
        "text_config": {**ENCODER, "eos_token_id": 60},
        "projection_dim": 8,
        "projection_intermediate_dim": 16,
    },
}


# ---- diffusers ----


def diffuser(name: str, **config: Any) -> Callable[[], nn.Module]:
    return lambda: of("diffusers", name)(**config)


def noised(**shapes: tuple[int, ...]) -> Callable[[torch.Generator], Inputs]:
    """Noise, and the step of each sample."""
    return joined(normal(**shapes), lambda g: {"timestep": torch.randint(0, 1000, (2,), generator=g)})


def add_diffusers() -> None:
    add = library("diffusers")
    two = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    crossed = {**two, "cross_attention_dim": 8, "attention_head_dim": 4, "sample_size": 8}
    crossed |= {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
    crossed_up = {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
    told = noised(sample=(2, 4, 8, 8), encoder_hidden_states=(2, 3, 8))
    plain = {"down_block_types": down, "up_block_types": up, "attention_head_dim": 4}
    add("UNet2DModel", diffuser("UNet2DModel", sample_size=8, **two, **plain), noised(sample=(2, 3, 8, 8)))
    add("UNet2DConditionModel", diffuser("UNet2DConditionModel", **crossed, **crossed_up), told)
    volume = {"down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D")}
    volume |= {"up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")}
    add(
        "UNet3DConditionModel",
        diffuser("UNet3DConditionModel", **{**crossed, **volume}),
        noised(sample=(2, 4, 2, 8, 8), encoder_hidden_states=(2, 3, 8)),
    )
    add(
        "ControlNetModel",
        diffuser(
            "ControlNetModel",
            **{k: v for k, v in crossed.items() if k != "sample_size"},
            **{"conditioning_embedding_out_channels": (8, 16)},
        ),
        joined(told, normal(controlnet_cond=(2, 3, 16, 16))),
    )
    coder = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    add("AutoencoderKL", diffuser("AutoencoderKL", **two, **coder), images(8, name="sample"))
    add("VQModel", diffuser("VQModel", **two, **coder, num_vq_embeddings=16), images(8, name="sample"))
    add(
        "AsymmetricAutoencoderKL",
        diffuser(
            "AsymmetricAutoencoderKL",
            **coder,
            down_block_out_channels=(8, 16),
            up_block_out_channels=(8, 16),
            norm_num_groups=4,
        ),
        images(8, name="sample"),
    )
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
    add(
        "Transformer2DModel",
        diffuser("Transformer2DModel", **heads, in_channels=4, cross_attention_dim=8, norm_num_groups=4),
        joined(normal(hidden_states=(2, 4, 4, 4), encoder_hidden_states=(2, 3, 8))),
    )
    add(
        "DiTTransformer2DModel",
        diffuser("DiTTransformer2DModel", **heads, in_channels=4, sample_size=4, norm_num_groups=4),
        joined(
            noised(hidden_states=(2, 4, 4, 4)), lambda g: {"class_labels": torch.randint(0, 1000, (2,), generator=g)}
        ),
    )
    add(
        "PixArtTransformer2DModel",
        diffuser(
            "PixArtTransformer2DModel",
            **heads,
            in_channels=4,
            sample_size=4,
            cross_attention_dim=16,
            caption_channels=8,
            use_additional_conditions=False,
        ),
        joined(
            noised(hidden_states=(2, 4, 4, 4), encoder_hidden_states=(2, 3, 8)),
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ),
    )
    add(
        "SD3Transformer2DModel",
        diffuser(
            "SD3Transformer2DModel",
            **heads,
            sample_size=4,
            in_channels=4,
            joint_attention_dim=8,
            caption_projection_dim=16,
            pooled_projection_dim=8,
            out_channels=4,
            pos_embed_max_size=8,
        ),
        noised(hidden_states=(2, 4, 4, 4), encoder_hidden_states=(2, 3, 8), pooled_projections=(2, 8)),
    )
    add(
        "FluxTransformer2DModel",
        diffuser(
            "FluxTransformer2DModel",
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=8,
            pooled_projection_dim=8,
            axes_dims_rope=(2, 2, 4),
        ),
        joined(
            normal(hidden_states=(2, 4, 4), encoder_hidden_states=(2, 3, 8), pooled_projections=(2, 8)),
            lambda g: {
                "timestep": torch.rand(2, generator=g, dtype=F64),
                "img_ids": torch.zeros(4, 3),
                "txt_ids": torch.zeros(3, 3),
            },
        ),
    )
    add(
        "PriorTransformer",
        diffuser("PriorTransformer", **heads, embedding_dim=8, num_embeddings=3, additional_embeddings=4),
        noised(hidden_states=(2, 8), proj_embedding=(2, 8), encoder_hidden_states=(2, 3, 8)),
    )
    add(
        "AuraFlowTransformer2DModel",
        diffuser(
            "AuraFlowTransformer2DModel",
            sample_size=8,
            in_channels=4,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=8,
            caption_projection_dim=16,
            out_channels=4,
            pos_embed_max_size=64,
        ),
        joined(
            normal(hidden_states=(2, 4, 8, 8), encoder_hidden_states=(2, 3, 8)),
            lambda g: {"timestep": torch.rand(2, generator=g, dtype=F64)},
        ),
    )
    add(
        "SanaTransformer2DModel",
        diffuser(
            "SanaTransformer2DModel",
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=1,
            num_cross_attention_heads=2,
            cross_attention_head_dim=8,
            cross_attention_dim=16,
            caption_channels=8,
            sample_size=4,
        ),
        noised(hidden_states=(2, 4, 4, 4), encoder_hidden_states=(2, 3, 8)),
    )
    add(
        "AutoencoderDC",
        diffuser(
            "AutoencoderDC",
            encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"),
            encoder_block_out_channels=(8, 16),
            decoder_block_out_channels=(8, 16),
            encoder_qkv_multiscales=((), (5,)),
            decoder_qkv_multiscales=((), (5,)),
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            decoder_norm_types=("rms_norm", "rms_norm"),
            decoder_act_fns=("silu", "silu"),
            latent_channels=4,
            attention_head_dim=4,
            downsample_block_type="Conv",
            upsample_block_type="interpolate",
        ),
        images(16, name="sample"),
    )
    add(
        "CogVideoXTransformer3DModel",
        diffuser(
            "CogVideoXTransformer3DModel",
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=4,
            time_embed_dim=4,
            text_embed_dim=8,
            num_layers=1,
            sample_width=8,
            sample_height=8,
            sample_frames=5,
            patch_size=2,
            max_text_seq_length=3,
        ),
        noised(hidden_states=(2, 2, 4, 8, 8), encoder_hidden_states=(2, 3, 8)),
    )
    add(
        "LatteTransformer3DModel",
        diffuser(
            "LatteTransformer3DModel",
            sample_size=8,
            num_layers=1,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=2,
            caption_channels=8,
            in_channels=4,
            cross_attention_dim=16,
            out_channels=8,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
        ),
        joined(noised(hidden_states=(2, 4, 1, 8, 8), encoder_hidden_states=(2, 3, 8)), enable_temporal_attentions=True),
    )
    add(
        "AutoencoderKLTemporalDecoder",
        diffuser(
            "AutoencoderKLTemporalDecoder",
            block_out_channels=(32, 32),
            layers_per_block=1,
            down_block_types=("DownEncoderBlock2D",) * 2,
        ),
        joined(images(8, name="sample"), num_frames=2),
    )
    add(
        "UVit2DModel",
        diffuser(
            "UVit2DModel",
            hidden_size=16,
            cond_embed_dim=8,
            micro_cond_encode_dim=4,
            micro_cond_embed_dim=20,
            encoder_hidden_size=8,
            vocab_size=16,
            codebook_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            block_num_heads=2,
            sample_size=4,
            intermediate_size=32,
            in_channels=8,
            block_out_channels=8,
        ),
        joined(
            normal(encoder_hidden_states=(2, 3, 8), pooled_text_emb=(2, 8), micro_conds=(2, 5)),
            lambda g: {"input_ids": torch.randint(0, 16, (2, 4, 4), generator=g)},
        ),
    )


# ---- x-transformers ----


def add_x_transformers() -> None:
    add = library("x-transformers")

    def layers(name: str, of_: str = "Decoder", given: Any = None, **how: Any) -> None:
        wrapper = {
            k: how.pop(k)
            for k in list(how)
            if k
            in (
                "num_memory_tokens",
                "tie_embedding",
                "use_abs_pos_emb",
                "scaled_sinu_pos_emb",
                "emb_dim",
                "num_output_heads",
                "l2norm_embed",
                "post_emb_norm",
            )
        }

        def build() -> nn.Module:
            x = importlib.import_module("x_transformers")
            inner = getattr(x, of_)(dim=16, depth=2, heads=2, attn_dim_head=8, **how)
            return x.TransformerWrapper(num_tokens=61, max_seq_len=32, attn_layers=inner, **wrapper)

        draw = tokens("x")
        add(f"x-transformers {name}", build, given or draw)

    layers("Decoder")
    layers("Encoder", "Encoder", num_memory_tokens=3)
    layers("rotary, SwiGLU", rotary_pos_emb=True, ff_swish=True, ff_glu=True, ff_no_bias=True)
    layers("ALiBi", alibi_pos_bias=True, use_abs_pos_emb=False)
    layers("relative positions", rel_pos_bias=True)
    layers("RMSNorm, one key", use_rmsnorm=True, attn_one_kv_head=True)
    layers("grouped keys, qk-norm", attn_kv_heads=1, attn_qk_norm=True)
    layers("talking heads", attn_pre_talking_heads=True)
    layers("sandwich", sandwich_coef=1)
    layers("macaron", macaron=True)
    layers("residual gates", gate_residual=True)
    layers("dropped layers", layer_dropout=0.4)
    layers("memories of keys", attn_num_mem_kv=2)
    layers("shifted tokens", shift_tokens=1)
    layers("sparse top-k attention", attn_sparse_topk=4)
    layers("tied embedding", tie_embedding=True)
    layers("hyper-connections", num_residual_streams=2)
    layers("gated values", attn_gate_values=True)
    layers("scaled residuals", scale_residual=True)
    layers("sinusoidal", scaled_sinu_pos_emb=True)
    layers("post-norm", pre_norm=False, residual_attn=True)

    def continuous() -> nn.Module:
        x = importlib.import_module("x_transformers")
        inner = x.Decoder(dim=16, depth=2, heads=2, attn_dim_head=8)
        return x.ContinuousTransformerWrapper(dim_in=6, dim_out=5, max_seq_len=32, attn_layers=inner)

    add("x-transformers continuous", continuous, normal(x=(2, 12, 6)))

    def image() -> nn.Module:
        x = importlib.import_module("x_transformers")
        inner = x.Encoder(dim=16, depth=2, heads=2, attn_dim_head=8)
        return x.ViTransformerWrapper(image_size=16, patch_size=8, num_classes=5, attn_layers=inner)

    add("x-transformers images", image, normal(img=(2, 3, 16, 16)))

    def both() -> nn.Module:
        x = importlib.import_module("x_transformers")
        sizes = {"num_tokens": 61, "depth": 1, "heads": 2, "max_seq_len": 32}
        of_both = {f"{side}_{k}": v for side in ("enc", "dec") for k, v in sizes.items()}
        return x.XTransformer(dim=16, **of_both, tie_token_emb=True)

    add("x-transformers encoder and decoder", both, tokens("src", "tgt"))


# ---- torch itself ----


class Called(nn.Module):
    """A module, or several, called by a function."""

    def __init__(self, forward: Callable[..., Any], **modules: Any):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self.how = forward

    def forward(self, *args: Any) -> Any:
        return self.how(self, *args)


def residual(m: Any, x: Tensor) -> Tensor:
    for block in m.blocks:
        x = x + block(x)
    return m.head(x)


def u_net(m: Any, x: Tensor) -> Tensor:
    kept = m.first(x)
    deep = m.deep(nn.functional.max_pool2d(kept, 2))
    return m.last(torch.cat([kept, nn.functional.interpolate(deep, scale_factor=2)], 1))


def variational(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    mean, log_var = m.encoder(x).chunk(2, -1)
    return m.decoder(mean + torch.randn_like(mean) * (log_var / 2).exp()), mean.square() + log_var


def chosen_experts(m: Any, x: Tensor) -> Tensor:
    weights = m.gate(x).softmax(-1)
    best = weights.topk(1, -1)
    out = torch.zeros_like(x)
    for i, expert in enumerate(m.experts):
        rows = (best.indices[:, 0] == i).nonzero()[:, 0]
        if len(rows):  # an expert without tokens has no gradient
            out = out.index_add(0, rows, expert(x[rows]) * best.values[rows])
    return out


def coupled(m: Any, x: Tensor) -> Tensor:
    total = x.new_zeros(len(x))
    for net in m.nets:
        a, b = x.chunk(2, -1)
        scale, shift = net(a).chunk(2, -1)
        x = torch.cat([b * scale.tanh().exp() + shift, a], -1)
        total = total + scale.tanh().sum(-1)
    return total - x.square().sum(-1) / 2


def energy_and_forces(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        energy = m.net(x)
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return energy, forces


def equation(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The residual of u'' = sin(u) and the value at zero."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        u = m.net(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return second - u.sin(), m.net(torch.zeros_like(x))


def over_tangents(m: Any, x: Tensor) -> Tensor:
    """A divergence by forward mode, as a continuous flow needs it."""
    return torch.func.vmap(torch.func.jacrev(m.net))(x).diagonal(dim1=-2, dim2=-1).sum(-1)


def fixed_point(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        z = torch.zeros_like(x)
        for _ in range(20):
            z = torch.tanh(m.net(z) / 4 + x)
    return torch.tanh(m.net(z) / 4 + x)


def generated(m: Any, x: Tensor) -> Tensor:
    """The weights of one network come from another."""
    weight = m.hyper(m.code).view(5, 6)
    return nn.functional.linear(x, weight)


def spectral(m: Any, x: Tensor) -> Tensor:
    """A Fourier layer whose complex weights are two real ones."""
    modes = torch.fft.rfft(x)[..., :4]
    y = torch.einsum("bik,iok->bok", modes, torch.complex(m.real, m.imaginary))
    return torch.fft.irfft(y, n=x.shape[-1]) + m.skip(x)


def graph_layers(m: Any, x: Tensor, adjacency: Tensor) -> Tensor:
    joined = adjacency.softmax(-1)
    return m.second(joined @ m.first(joined @ x).relu())


def quantized(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    z = m.encoder(x)
    code = m.codes.weight[torch.cdist(z, m.codes.weight).argmin(-1)]
    return m.decoder(z + (code - z).detach()), (code - z.detach()).square() + (z - code.detach()).square() / 4


def add_torch() -> None:
    add = library("torch.nn")

    def mlp(*sizes: int, act: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
        made = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), act())]
        return nn.Sequential(*made[:-1])

    rows, picture, series = positional((4, 6)), positional((2, 3, 8, 8)), positional((2, 7, 6))
    add("perceptron", lambda: mlp(6, 16, 16, 5), rows)
    add(
        "perceptron, BatchNorm",
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5)),
        rows,
    )
    add(
        "perceptron, Dropout, PReLU",
        lambda: nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.Dropout(0.3), nn.Linear(8, 5)),
        rows,
    )
    add(
        "residual network",
        lambda: Called(residual, blocks=nn.ModuleList(mlp(6, 8, 6) for _ in range(3)), head=nn.Linear(6, 2)),
        rows,
    )
    add(
        "convolutions",
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.GELU(),
            nn.GroupNorm(2, 8),
            nn.Conv2d(8, 8, 3, groups=8),
            nn.Conv2d(8, 4, 1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        ),
        picture,
    )
    add(
        "convolutions, BatchNorm",
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 4, 2),
            nn.InstanceNorm2d(4, affine=True),
        ),
        picture,
    )
    add(
        "convolutions of a volume",
        lambda: nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.SiLU(), nn.ConvTranspose3d(4, 2, 2, stride=2)),
        positional((2, 1, 4, 4, 4)),
    )
    add(
        "dilated convolutions",
        lambda: nn.Sequential(*(nn.Conv1d(a, 6, 2, dilation=d) for a, d in ((2, 1), (6, 2), (6, 4)))),
        positional((2, 2, 16)),
    )
    add(
        "U-Net",
        lambda: Called(
            u_net, first=nn.Conv2d(3, 4, 3, padding=1), deep=nn.Conv2d(4, 8, 3, padding=1), last=nn.Conv2d(12, 2, 1)
        ),
        picture,
    )
    add("LSTM", lambda: nn.LSTM(6, 8, num_layers=2, batch_first=True, dropout=0.2), series)
    add("LSTM, two directions", lambda: nn.LSTM(6, 8, bidirectional=True, proj_size=4), series)
    add("GRU", lambda: nn.GRU(6, 8, num_layers=2), series)
    add("RNN", lambda: nn.RNN(6, 8), series)
    add("GRUCell in a loop", lambda: Called(looped, cell=nn.GRUCell(6, 8)), series)
    add(
        "TransformerEncoder",
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2, enable_nested_tensor=False
        ),
        positional((2, 7, 16)),
    )
    add(
        "TransformerDecoder",
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, batch_first=True, norm_first=True), 2),
        positional((2, 7, 16), (2, 5, 16)),
    )
    add("Transformer", lambda: nn.Transformer(16, 4, 1, 1, 32, batch_first=True), positional((2, 7, 16), (2, 5, 16)))
    add(
        "MultiheadAttention",
        lambda: nn.MultiheadAttention(16, 4, kdim=6, vdim=5, add_bias_kv=True, batch_first=True),
        positional((2, 7, 16), (2, 4, 6), (2, 4, 5)),
    )
    add(
        "EmbeddingBag",
        lambda: nn.Sequential(nn.EmbeddingBag(20, 8), nn.Linear(8, 3)),
        lambda g: (torch.randint(0, 20, (4, 5), generator=g),),
    )
    add(
        "Embedding with padding",
        lambda: nn.Sequential(nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 3)),
        lambda g: (torch.randint(0, 20, (4, 5), generator=g),),
    )
    add("Bilinear", lambda: nn.Bilinear(6, 5, 4), positional((3, 6), (3, 5)))
    add(
        "weight_norm",
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 2)),
        rows,
    )
    add(
        "weight_norm by a hook",
        lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 2)),
        rows,
    )
    add(
        "spectral_norm",
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.ReLU(), nn.Linear(8, 2)),
        rows,
    )
    add(
        "orthogonal",
        lambda: nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, 2)),
        rows,
    )
    add(
        "tied autoencoder",
        lambda: Called(
            lambda m, x: nn.functional.linear(m.encoder(x).tanh(), m.encoder.weight.T), encoder=nn.Linear(6, 4)
        ),
        rows,
    )
    add("variational autoencoder", lambda: Called(variational, encoder=mlp(6, 8, 8), decoder=mlp(4, 8, 6)), rows)
    add(
        "vector-quantized autoencoder",
        lambda: Called(quantized, encoder=mlp(6, 8, 4), decoder=mlp(4, 8, 6), codes=nn.Embedding(7, 4)),
        rows,
    )
    add(
        "mixture of experts",
        lambda: Called(chosen_experts, gate=nn.Linear(6, 3), experts=nn.ModuleList(mlp(6, 8, 6) for _ in range(3))),
        rows,
    )
    add("RealNVP", lambda: Called(coupled, nets=nn.ModuleList(mlp(3, 8, 6) for _ in range(3))), rows)
    add("energies and forces", lambda: Called(energy_and_forces, net=mlp(6, 16, 1, act=nn.SiLU)), rows)
    add("physics-informed network", lambda: Called(equation, net=mlp(1, 16, 16, 1)), positional((8, 1)))
    add("divergence of a field", lambda: Called(over_tangents, net=mlp(6, 8, 6)), rows)
    add("equilibrium", lambda: Called(fixed_point, net=nn.Linear(6, 6)), rows)
    add("hypernetwork", lambda: Called(generated, hyper=mlp(4, 8, 30), code=nn.Parameter(torch.randn(4))), rows)
    add(
        "Fourier layer",
        lambda: Called(
            spectral,
            real=nn.Parameter(torch.randn(3, 5, 4)),
            imaginary=nn.Parameter(torch.randn(3, 5, 4)),
            skip=nn.Conv1d(3, 5, 1),
        ),
        positional((2, 3, 16)),
    )
    add(
        "graph convolutions",
        lambda: Called(graph_layers, first=nn.Linear(6, 8), second=nn.Linear(8, 2)),
        positional((5, 6), (5, 5)),
    )
    add(
        "SIREN",
        lambda: Called(lambda m, x: m.last((30 * m.first(x)).sin()), first=nn.Linear(2, 16), last=nn.Linear(16, 3)),
        positional((9, 2)),
    )
    add(
        "numbers without dimensions",
        lambda: Called(
            lambda m, x: m.net(x) * m.gain + m.shift,
            net=nn.Linear(6, 3),
            gain=nn.Parameter(torch.tensor(0.7)),
            shift=nn.Parameter(torch.tensor(0.1)),
        ),
        rows,
    )
    add(
        "lists of parameters",
        lambda: Called(
            lambda m, x: sum(x @ w for w in m.ws) * m.by["a"],
            ws=nn.ParameterList(torch.randn(6, 3) for _ in range(3)),
            by=nn.ParameterDict({"a": torch.randn(3), "unused": torch.randn(2)}),
        ),
        rows,
    )
    add(
        "PixelShuffle",
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.PixelShuffle(2), nn.LocalResponseNorm(2), nn.Conv2d(2, 3, 3)
        ),
        picture,
    )
    add(
        "AdaptiveLogSoftmax",
        lambda: nn.AdaptiveLogSoftmaxWithLoss(6, 20, [5, 12]),
        lambda g: (torch.randn(8, 6, generator=g, dtype=F64), torch.randint(0, 20, (8,), generator=g)),
    )
    add("checkpointed blocks", lambda: Called(recomputed, blocks=nn.ModuleList(mlp(6, 8, 6) for _ in range(2))), rows)


def looped(m: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 8)
    for t in range(x.shape[1]):
        h = m.cell(x[:, t], h)
    return h


def recomputed(m: Any, x: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    for block in m.blocks:
        x = x + checkpoint(block, x, use_reentrant=False)
    return x


# ---- science ----


def graph(nodes: int = 8, edges: int = 20, features: int = 6) -> Callable[[torch.Generator], Inputs]:
    def draw(g: torch.Generator) -> Inputs:
        x = torch.randn(nodes, features, generator=g, dtype=F64)
        return x, torch.randint(0, nodes, (2, edges), generator=g)

    return draw


def add_graphs() -> None:
    add = library("torch_geometric")

    def model(name: str, **how: Any) -> None:
        def build() -> nn.Module:
            return of("torch_geometric.nn", name)(6, 8, num_layers=2, out_channels=3, **how)

        add(f"PyG {name}", build, graph())

    model("GCN")
    model("GraphSAGE")
    model("GIN")
    model("GAT", heads=2)
    model("EdgeCNN")
    model("PNA", aggregators=["mean", "max"], scalers=["identity"], deg=torch.tensor([1, 3, 4]))

    def layer(name: str, *args: Any, **how: Any) -> None:
        add(f"PyG {name}", lambda: of("torch_geometric.nn", name)(*args, **how), graph())

    layer("TransformerConv", 6, 4, heads=2)
    layer("GATv2Conv", 6, 4, heads=2)
    layer("ChebConv", 6, 4, K=3)
    layer("TAGConv", 6, 4)
    layer("ARMAConv", 6, 4)
    layer("SGConv", 6, 4, K=2)
    layer("FeaStConv", 6, 4)
    layer("ResGatedGraphConv", 6, 4)
    layer("GatedGraphConv", 6, 2)
    layer("GENConv", 6, 4)
    layer("MFConv", 6, 4)
    layer("SuperGATConv", 6, 4)
    layer("ClusterGCNConv", 6, 4)
    layer("LEConv", 6, 4)
    layer("GeneralConv", 6, 4)


def add_science() -> None:
    add = library("neuraloperator")
    for name, size in (("FNO", {"n_modes": (4, 4)}), ("TFNO", {"n_modes": (4, 4)})):
        add(
            f"neuralop {name}",
            lambda name=name, size=size: of("neuralop.models", name)(
                **size, in_channels=1, out_channels=1, hidden_channels=8, n_layers=2
            ),
            normal(x=(2, 1, 8, 8)),
        )

    add = library("e3nn")
    add("e3nn gated network", lambda: equivariant(), positional((5, 7)))
    add(
        "e3nn tensor product",
        lambda: of("e3nn.o3", "FullyConnectedTensorProduct")("2x0e + 1x1o", "1x0e + 1x1o", "3x0e + 1x1o"),
        positional((5, 5), (5, 4)),
    )
    add(
        "e3nn linear and norm",
        lambda: nn.Sequential(
            of("e3nn.o3", "Linear")("2x0e + 1x1o", "4x0e + 2x1o"), of("e3nn.nn", "BatchNorm")("4x0e + 2x1o")
        ),
        positional((5, 5)),
    )

    add = library("gpytorch")
    add("gpytorch ExactGP", exact_gp, lambda g: ())
    add("gpytorch deep kernel", lambda: exact_gp(deep=True), lambda g: ())
    add("gpytorch SVGP", variational_gp, positional((6, 1)))

    add = library("zuko")
    for name, how in (
        ("MAF", {"transforms": 2}),
        ("NSF", {"transforms": 2, "bins": 4}),
        ("NICE", {"transforms": 2}),
        ("NCSF", {"transforms": 1, "bins": 4}),
        ("SOSPF", {"transforms": 1}),
        ("NAF", {"transforms": 1}),
        ("UNAF", {"transforms": 1}),
        ("GF", {"transforms": 1}),
        ("BPF", {"transforms": 1}),
    ):
        build = functools.partial(density, name, how)
        add(f"zuko {name}", build, positional((4, 3)))

    add = library("monai")
    flat = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
    shots = positional((2, 1, 32, 32))

    def net(name: str, given: Any = shots, **how: Any) -> None:
        add(f"monai {name}", lambda: of("monai.networks.nets", name)(**how), given)

    net("UNet", **flat, channels=(4, 8, 8), strides=(2, 2), num_res_units=1)
    net("AttentionUnet", **flat, channels=(4, 8, 8), strides=(2, 2))
    net("BasicUNet", **flat, features=(4, 4, 8, 8, 8, 4))
    net("DynUNet", **flat, kernel_size=[3, 3, 3], strides=[1, 2, 2], upsample_kernel_size=[2, 2], filters=[4, 8, 8])
    net("SegResNet", **flat, init_filters=8, blocks_down=(1, 1), blocks_up=(1,))
    net("HighResNet", **flat)
    net("UNETR", **flat, img_size=32, feature_size=4, hidden_size=16, mlp_dim=16, num_heads=2)
    net("DenseNet", **flat, init_features=8, growth_rate=4, block_config=(1, 1))
    net("AutoEncoder", **flat, channels=(4, 8), strides=(2, 2))
    net(
        "VarAutoEncoder",
        spatial_dims=2,
        in_shape=(1, 32, 32),
        out_channels=1,
        latent_size=3,
        channels=(4, 8),
        strides=(2, 2),
    )
    net(
        "ViT",
        in_channels=1,
        img_size=(32, 32),
        patch_size=(16, 16),
        hidden_size=16,
        mlp_dim=16,
        num_layers=2,
        num_heads=2,
        spatial_dims=2,
        classification=True,
    )
    net(
        "ResNet",
        block="basic",
        layers=[1, 1, 1, 1],
        block_inplanes=[4, 4, 8, 8],
        spatial_dims=2,
        n_input_channels=1,
        num_classes=3,
    )
    net(
        "Regressor",
        in_shape=(1, 16, 16),
        out_shape=(1,),
        channels=(4, 8),
        strides=(2, 2),
        given=positional((2, 1, 16, 16)),
    )
    net("Discriminator", in_shape=(1, 16, 16), channels=(4, 8), strides=(2, 2), given=positional((2, 1, 16, 16)))
    net(
        "Generator", latent_shape=(6,), start_shape=(4, 4, 4), channels=(4, 1), strides=(2, 2), given=positional((2, 6))
    )

    add = library("others")
    add(
        "normflows RealNVP",
        normalizing,
        positional((6, 2)),
    )
    add("nflows MAF", masked_flow, positional((6, 3)))
    add(
        "EGNN",
        lambda: Called(
            lambda m, f, c: m.net(f, c),
            net=of("egnn_pytorch", "EGNN_Network")(depth=2, dim=8, num_nearest_neighbors=3, norm_coors=True),
        ),
        lambda g: (torch.randn(1, 6, 8, generator=g, dtype=F64), torch.randn(1, 6, 3, generator=g, dtype=F64)),
    )
    add(
        "SirenNet",
        lambda: of("siren_pytorch", "SirenNet")(dim_in=2, dim_hidden=16, dim_out=3, num_layers=2),
        positional((9, 2)),
    )
    add("neural ODE", ode, positional((4, 3)))
    LIBRARY.update({"normflows RealNVP": "normflows", "nflows MAF": "nflows", "EGNN": "egnn-pytorch"})
    LIBRARY.update({"SirenNet": "siren-pytorch", "neural ODE": "torchdiffeq"})


def equivariant() -> nn.Module:
    o3, parts = importlib.import_module("e3nn.o3"), importlib.import_module("e3nn.nn")
    gate = parts.Gate("4x0e", [torch.tanh], "2x0e", [torch.sigmoid], "2x1o")
    return Called(
        lambda m, x: m.last(m.gate(m.first(m.features(x)))),
        features=o3.Linear("4x0e + 1x1o", "4x0e + 2x1o"),
        first=o3.Linear("4x0e + 2x1o", gate.irreps_in),
        gate=gate,
        last=o3.Linear(gate.irreps_out, "1x0e + 1x1o"),
    )


def exact_gp(deep: bool = False) -> nn.Module:
    gpytorch = importlib.import_module("gpytorch")
    draw = torch.Generator().manual_seed(3)
    x = torch.rand(10, 2, generator=draw, dtype=F64)
    y = torch.sin(3 * x[:, 0]) + x[:, 1]

    class Process(gpytorch.models.ExactGP):
        def __init__(self, likelihood: Any):
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2))
            self.features = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)) if deep else nn.Identity()

        def forward(self, x: Tensor) -> Any:
            z = self.features(x)
            return gpytorch.distributions.MultivariateNormal(self.mean_module(z), self.covar_module(z))

    process = Process(gpytorch.likelihoods.GaussianLikelihood())
    sums = gpytorch.mlls.ExactMarginalLogLikelihood(process.likelihood, process)
    return Called(lambda m: -m.sums(m.sums.model(*m.sums.model.train_inputs), y), sums=sums)


def variational_gp() -> nn.Module:
    gpytorch = importlib.import_module("gpytorch")

    class Process(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            points = torch.linspace(-1, 1, 4, dtype=F64)[:, None]
            inner = gpytorch.variational.CholeskyVariationalDistribution(4)
            super().__init__(gpytorch.variational.VariationalStrategy(self, points, inner))
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    process = Process()
    # Else the first call draws the distribution's values, on each rank others.
    process.variational_strategy.variational_params_initialized.fill_(1)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    bound = gpytorch.mlls.VariationalELBO(likelihood, process, num_data=12)
    return Called(lambda m, x: -m.bound(m.bound.model(x), x[:, 0].sin()), bound=bound)


def density(name: str, how: Mapping[str, Any]) -> nn.Module:
    more = {} if name == "GF" else {"hidden_features": (8,)}
    if name in ("NAF", "UNAF"):
        more["network"] = {"hidden_features": (8,)}
    flow = of("zuko.flows", name)(3, **more, **how)
    squash = torch.tanh if name in ("NSF", "NCSF", "SOSPF", "BPF", "GF") else lambda x: x
    return Called(lambda m, x: m.flow().log_prob(squash(x)), flow=flow)


def normalizing() -> nn.Module:
    nf = importlib.import_module("normflows")
    flows = []
    for _ in range(2):
        flows += [
            nf.flows.AffineCouplingBlock(nf.nets.MLP([1, 8, 2], init_zeros=True)),
            nf.flows.Permute(2, mode="swap"),
        ]
    flow = nf.NormalizingFlow(nf.distributions.base.DiagGaussian(2), flows)
    return Called(lambda m, x: m.flow.log_prob(x), flow=flow)


def masked_flow() -> nn.Module:
    made = of("nflows.transforms.autoregressive", "MaskedAffineAutoregressiveTransform")(3, 8)
    base = of("nflows.distributions.normal", "StandardNormal")([3])
    return Called(lambda m, x: m.flow.log_prob(x), flow=of("nflows.flows.base", "Flow")(made, base))


def ode() -> nn.Module:
    odeint = of("torchdiffeq", "odeint")

    def forward(m: Any, x: Tensor) -> Tensor:
        times = torch.linspace(0, 1, 3, dtype=x.dtype)
        return odeint(lambda t, y: m.field(y), x, times, method="rk4")

    return Called(forward, field=nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)))


add_transformers()
add_diffusers()
add_x_transformers()
add_torch()
add_graphs()
add_science()

# Where torch by itself, on one process, raises in bf16, or has numbers that are not finite.
NO_BF16 = {
    *("FNetForMaskedLM", "ReformerModel", "vector-quantized autoencoder", "Fourier layer", "PixelShuffle"),
    *("PyG ClusterGCNConv", "neuralop FNO", "neuralop TFNO", "gpytorch deep kernel", "gpytorch SVGP"),
    *("orthogonal", "UNet3DConditionModel", "AutoencoderKLTemporalDecoder"),
}
# A bias in front of a BatchNorm over two samples has no gradient but for rounding, which the norm makes large.
NEAR = dict.fromkeys(("GroupViTModel", "LevitForImageClassification", "MobileNetV2ForImageClassification"), 1e-3)
# By architecture and way, words of the error with which it may be refused; "torch: " where torch raises too.
REFUSED: dict[str, dict[str, str]] = {
    # They call modules in backward, where the parameters of `functional_call` have left.
    **{name: {"pure": "torch: "} for name in ("zuko UNAF", "ReformerModel")},
    **{
        name: dict.fromkeys(("plain", "ZeRO-1", "ZeRO-2", "ZeRO-3", "accumulate", "pure"), "torch.complex128")
        for name in ("neuralop FNO", "neuralop TFNO")
    },
}
