"""Tensor names as llama.cpp's converter writes them."""

from __future__ import annotations

YARN_TRUNCATE = "rope.scaling.yarn_truncate"  # our own key, of config.json's `truncate`: no GGUF has one
# Likewise: a key head's value heads are neighbours, as in checkpoints.
SSM_GROUPED = "ssm.value_heads_grouped"
SSM_VALUE_DIM = "ssm.value_head_dim"  # likewise of `linear_value_head_dim`: a GGUF has all heads' together

# Likewise of layers without a matrix of v: in a GGUF it is missing.
VALUES_FROM_KEYS = "attention.values_from_keys"
DEEP_LAYERS = "n_deepstack_layers"
SPANS_SEE_AHEAD = "attention.spans_see_ahead"  # likewise of `use_bidirectional_attention`: no GGUF has it
# Likewise of biases of q, k and v (and of the output, where a family has it): in a GGUF the tensors say so.
HAS_QKV_BIAS = "attention.has_qkv_bias"
DENSE_LAYERS = "dense_layers"  # likewise of each layer, whether it has no experts
SLIDING_WINDOW = "attention.sliding_window"
WINDOWED_LAYERS = "attention.sliding_window_pattern"
ROTATED_SHARE = "rope.rotated_share"  # likewise of `partial_rotary_factor`, where a GGUF has ROPE_FREQS
ROPE_HALVES = "rope.in_halves"  # likewise: a head's halves rotate, where a GGUF has pairs of neighbours
YARN_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"

TOKEN_EMBD = "token_embd.weight"
OUTPUT = "output.weight"  # missing: the embedding is the output matrix too (tied)
OUTPUT_NORM = "output_norm.weight"
ROPE_FREQS = "rope_freqs.weight"  # by which frequencies are divided

ATTN_NORM = "attn_norm"
ATTN_Q = "attn_q"
ATTN_K = "attn_k"
ATTN_V = "attn_v"
ATTN_OUTPUT = "attn_output"
ATTN_Q_NORM = "attn_q_norm"
ATTN_K_NORM = "attn_k_norm"
ATTN_SINKS = "attn_sinks"
# Of latent attention.
ATTN_Q_A = "attn_q_a"
ATTN_Q_A_NORM = "attn_q_a_norm"
ATTN_Q_B = "attn_q_b"
ATTN_KV_A_MQA = "attn_kv_a_mqa"
ATTN_KV_A_NORM = "attn_kv_a_norm"
ATTN_K_B = "attn_k_b"  # by head, transposed
ATTN_V_B = "attn_v_b"  # by head
ATTN_KV_B = "attn_kv_b"  # of older files, in place of the two
# Of a gated DeltaNet. llama.cpp calls what recurrent layers have by the names of state space models.
ATTN_QKV = "attn_qkv"
ATTN_GATE = "attn_gate"  # z
SSM_BA = "ssm_ba"
SSM_BETA = "ssm_beta"
SSM_ALPHA = "ssm_alpha"
SSM_CONV1D = "ssm_conv1d"
SSM_A = "ssm_a"  # the full name within its layer
SSM_DT = "ssm_dt"  # a bias
SSM_NORM = "ssm_norm"
SSM_OUT = "ssm_out"
# Of Mamba-2: one matrix for z, the convolution's channels and dt; and the factors of x, the full name.
SSM_IN = "ssm_in"
SSM_D = "ssm_d"
# Of Kimi Delta Attention: its convolutions, and what decays (f) and output gates (g) are made from, and from that.
SSM_CONVS = ("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v")
SSM_F_A = "ssm_f_a"
SSM_F_B = "ssm_f_b"
SSM_G_A = "ssm_g_a"
SSM_G_B = "ssm_g_b"
FFN_NORM = "ffn_norm"
POST_ATTENTION_NORM = "post_attention_norm"  # the same norm by another name, in some architectures
# Of a layer whose blocks' outputs are normalised before they are added. There POST_ATTENTION_NORM is attention's.
POST_FFW_NORM = "post_ffw_norm"
POST_FFW_NORM_1 = "post_ffw_norm_1"  # of the dense feed-forward beside experts
PRE_FFW_NORM_2 = "pre_ffw_norm_2"  # of the experts' input
POST_FFW_NORM_2 = "post_ffw_norm_2"  # and output
LAYER_OUTPUT_SCALE = "layer_output_scale"
# Of models whose layers have inputs of their own: a table of all layers' for each token, and what is made of the
# embeddings and added to it, then the parts of a layer.
LAYER_INPUT_EMBD = "per_layer_token_embd.weight"
LAYER_INPUT_MODEL_PROJ = "per_layer_model_proj.weight"
LAYER_INPUT_PROJ_NORM = "per_layer_proj_norm.weight"
LAYER_INPUT_GATE = "inp_gate"
LAYER_INPUT_PROJ = "proj"
LAYER_INPUT_NORM = "post_norm"
# What chooses the keys of latent attention.
INDEXER = (
    "indexer.attn_k.weight",
    "indexer.attn_q_b.weight",
    "indexer.proj.weight",
    "indexer.k_norm.weight",
    "indexer.k_norm.bias",
)
# What chooses blocks of keys in MiniMax-M3.
BLOCK_INDEXER = (
    "indexer.q_proj.weight",
    "indexer.k_proj.weight",
    "indexer.q_norm.weight",
    "indexer.k_norm.weight",
)
FFN_GATE = "ffn_gate"  # of a layer without experts
FFN_UP = "ffn_up"
FFN_DOWN = "ffn_down"
FFN_GATE_INP = "ffn_gate_inp"  # the router
EXP_PROBS_B = "exp_probs_b"  # a bias: added to scores, for the choice alone
FFN_GATE_EXPS = "ffn_gate_exps"
FFN_UP_EXPS = "ffn_up_exps"
FFN_DOWN_EXPS = "ffn_down_exps"
FFN_GATE_UP_EXPS = "ffn_gate_up_exps"  # both in one tensor: merged_experts.py
FFN_GATE_SHEXP = "ffn_gate_shexp"  # the shared expert's
FFN_UP_SHEXP = "ffn_up_shexp"
FFN_DOWN_SHEXP = "ffn_down_shexp"
FFN_GATE_INP_SHEXP = "ffn_gate_inp_shexp"  # a vector: the gate of the shared expert's output

# Of a next-token block (MTP), beside the parts of its layer.
NEXTN_EH_PROJ = "nextn.eh_proj"
NEXTN_ENORM = "nextn.enorm"
NEXTN_HNORM = "nextn.hnorm"
NEXTN_HEAD_NORM = "nextn.shared_head_norm"

# Gate, up and down.
FFN_PARTS = (FFN_GATE, FFN_UP, FFN_DOWN)
EXPERT_PARTS = (FFN_GATE_EXPS, FFN_UP_EXPS, FFN_DOWN_EXPS)
SHARED_PARTS = (FFN_GATE_SHEXP, FFN_UP_SHEXP, FFN_DOWN_SHEXP)
# Of feed-forwards without a gate: activation(up, up), one product.
UNGATED_FFN_PARTS = (FFN_UP, FFN_UP, FFN_DOWN)
UNGATED_EXPERT_PARTS = (FFN_UP_EXPS, FFN_UP_EXPS, FFN_DOWN_EXPS)
UNGATED_SHARED_PARTS = (FFN_UP_SHEXP, FFN_UP_SHEXP, FFN_DOWN_SHEXP)


def of_part(part: str) -> str:
    """Returns the name of a part's weight within its layer: of_part(ATTN_Q) is "attn_q.weight"."""
    return f"{part}.weight"


def bias_of_part(part: str) -> str:
    return f"{part}.bias"


def scale_of_part(part: str) -> str:
    return f"{part}.scale"


def in_layer(layer: int, name: str) -> str:
    """Returns the full name: in_layer(3, "attn_q.weight") is "blk.3.attn_q.weight"."""
    return f"blk.{layer}.{name}"


def of_layer(layer: int, part: str) -> str:
    """Returns the full name of a part's weight: of_layer(3, ATTN_Q) is "blk.3.attn_q.weight"."""
    return in_layer(layer, of_part(part))


def bias_of_layer(layer: int, part: str) -> str:
    return in_layer(layer, bias_of_part(part))


def layer_of(name: str) -> int | None:
    """Returns the layer in a tensor's full name; None if it has none."""
    block, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if block == "blk" and number.isdecimal() and len(number) < 6 else None
