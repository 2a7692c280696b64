"""The rows of architectures that transformers' own code computes, and that tests compare with it."""

from __future__ import annotations

from protos.architecture import GenericArchitecture

GENERIC: dict[str, GenericArchitecture] = {
    "AfmoeForCausalLM": GenericArchitecture(
        model_type="afmoe", about="experts; gated attention; a window in most layers"
    ),
    "ApertusForCausalLM": GenericArchitecture(model_type="apertus", about="norms of queries and keys; xIELU"),
    "ArceeForCausalLM": GenericArchitecture(model_type="arcee", about="squared ReLU"),
    "BitNetForCausalLM": GenericArchitecture(model_type="bitnet", about="norms inside attention and MLP"),
    "CodeGenForCausalLM": GenericArchitecture(
        model_type="codegen", about="attention and MLP side by side; rotates in pairs"
    ),
    "CohereForCausalLM": GenericArchitecture(
        model_type="cohere", about="attention and MLP side by side; scaled logits"
    ),
    "Cohere2ForCausalLM": GenericArchitecture(
        model_type="cohere2", about="as Cohere, with a window in most layers and no rotary embedding in the others"
    ),
    "CwmForCausalLM": GenericArchitecture(model_type="cwm", about="a window in most layers"),
    "DeepseekV2ForCausalLM": GenericArchitecture(
        model_type="deepseek_v2", about="latent attention, whose keys and values are cached whole; experts"
    ),
    "DeepseekV3ForCausalLM": GenericArchitecture(
        model_type="deepseek_v3", about="latent attention, whose keys and values are cached whole; experts"
    ),
    "Dots1ForCausalLM": GenericArchitecture(model_type="dots1", about="experts; norms of queries and keys"),
    "Ernie4_5ForCausalLM": GenericArchitecture(model_type="ernie4_5", about="rotates in pairs"),
    "Ernie4_5_MoeForCausalLM": GenericArchitecture(model_type="ernie4_5_moe", about="experts; rotates in pairs"),
    "Exaone4ForCausalLM": GenericArchitecture(
        model_type="exaone4", about="norms behind attention and MLP; a window in most layers"
    ),
    "FlexOlmoForCausalLM": GenericArchitecture(model_type="flex_olmo", about="experts; norms behind attention and MLP"),
    "GPTBigCodeForCausalLM": GenericArchitecture(model_type="gpt_bigcode", about="learned positions; one KV head"),
    "GPTJForCausalLM": GenericArchitecture(model_type="gptj", about="attention and MLP side by side; rotates in pairs"),
    "GPTNeoXForCausalLM": GenericArchitecture(
        model_type="gpt_neox", about="attention and MLP side by side; rotates a part of each head"
    ),
    "GemmaForCausalLM": GenericArchitecture(model_type="gemma", about="scaled embeddings; GELU"),
    "GlmForCausalLM": GenericArchitecture(model_type="glm", about="rotates a part of each head, in pairs"),
    "Glm4ForCausalLM": GenericArchitecture(model_type="glm4", about="as GLM, with norms behind attention and MLP"),
    "Glm4MoeForCausalLM": GenericArchitecture(model_type="glm4_moe", about="experts; rotates a part of each head"),
    "Glm4MoeLiteForCausalLM": GenericArchitecture(model_type="glm4_moe_lite", about="latent attention; experts"),
    "GraniteForCausalLM": GenericArchitecture(model_type="granite", about="scales of its own everywhere"),
    "GraniteMoeForCausalLM": GenericArchitecture(
        model_type="granitemoe", about="experts; scales of its own everywhere"
    ),
    "HeliumForCausalLM": GenericArchitecture(model_type="helium", about="rotates in pairs"),
    "HunYuanDenseV1ForCausalLM": GenericArchitecture(model_type="hunyuan_v1_dense", about="norms of queries and keys"),
    "HunYuanMoEV1ForCausalLM": GenericArchitecture(
        model_type="hunyuan_v1_moe", about="experts; norms of queries and keys"
    ),
    "MiniCPM3ForCausalLM": GenericArchitecture(model_type="minicpm3", about="latent attention; scales of its own"),
    "MiniMaxM2ForCausalLM": GenericArchitecture(model_type="minimax_m2", about="experts; norms of queries and keys"),
    "MinistralForCausalLM": GenericArchitecture(model_type="ministral", about="a window in some layers"),
    "Ministral3ForCausalLM": GenericArchitecture(model_type="ministral3", about="queries scaled by position"),
    "NanoChatForCausalLM": GenericArchitecture(
        model_type="nanochat", about="norms without weights; squared ReLU; capped logits"
    ),
    "NemotronForCausalLM": GenericArchitecture(model_type="nemotron", about="layer norms; squared ReLU"),
    "OlmoForCausalLM": GenericArchitecture(
        model_type="olmo", about="layer norms without weights; clipped queries, keys and values"
    ),
    "OlmoeForCausalLM": GenericArchitecture(model_type="olmoe", about="experts; norms of queries and keys"),
    "PersimmonForCausalLM": GenericArchitecture(
        model_type="persimmon", about="layer norms of queries and keys; squared ReLU"
    ),
    "PhiForCausalLM": GenericArchitecture(
        model_type="phi", about="attention and MLP side by side; rotates a part of each head"
    ),
    "PhimoeForCausalLM": GenericArchitecture(model_type="phimoe", about="experts", limits="scaled rotary embeddings"),
    "Qwen2MoeForCausalLM": GenericArchitecture(model_type="qwen2_moe", about="experts, one of them shared"),
    "SeedOssForCausalLM": GenericArchitecture(model_type="seed_oss", about="biases of q, k, v"),
    "SolarOpenForCausalLM": GenericArchitecture(model_type="solar_open", about="experts"),
    "Starcoder2ForCausalLM": GenericArchitecture(model_type="starcoder2", about="layer norms; biases; a window"),
    "VaultGemmaForCausalLM": GenericArchitecture(
        model_type="vaultgemma", about="capped scores; a window in most layers"
    ),
}
"""By the class name that Hugging Face configs use."""
