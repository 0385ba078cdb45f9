"""Tensor names as llama.cpp's converter writes them."""

from __future__ import annotations

from typing import NamedTuple

YARN_TRUNCATE = "rope.scaling.yarn_truncate"  # no GGUF has this key: it stands for config.json's `truncate`
# No GGUF has this key: a key head's value heads are neighbours, as in checkpoints.
SSM_GROUPED = "ssm.value_heads_grouped"
# No GGUF has this key, only the total of all heads: `linear_value_head_dim`.
SSM_VALUE_DIM = "ssm.value_head_dim"

# No GGUF has this key: v is made from k, per layer. In a GGUF the v tensor is missing.
VALUES_FROM_KEYS = "attention.values_from_keys"
DEEP_LAYERS = "n_deepstack_layers"
SPANS_SEE_AHEAD = "attention.spans_see_ahead"  # no GGUF has this key: `use_bidirectional_attention`
# No GGUF has this key: q, k and v (in some families also the output) have biases. In a GGUF the tensors tell.
HAS_QKV_BIAS = "attention.has_qkv_bias"
DENSE_LAYERS = "dense_layers"  # no GGUF has this key: per layer, whether it has no experts
# No GGUF has these keys: per layer, whether it has no positions; whether q and k are normalised at all.
UNROTATED_LAYERS = "attention.unrotated_layers"
HAS_QK_NORM = "attention.has_qk_norm"
# A norm's epsilon says of which kind it is.
RMS_EPS = "attention.layer_norm_rms_epsilon"
LAYER_NORM_EPS = "attention.layer_norm_epsilon"
SLIDING_WINDOW = "attention.sliding_window"
WINDOWED_LAYERS = "attention.sliding_window_pattern"
ROTATED_SHARE = "rope.rotated_share"  # no GGUF has this key, but ROPE_FREQS: `partial_rotary_factor`
ROPE_HALVES = "rope.in_halves"  # no GGUF has this key: split halves rotate, not pairs of neighbours
YARN_LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"

TOKEN_EMBD = "token_embd.weight"
OUTPUT = "output.weight"  # missing: the embedding is also the output matrix (tied)
OUTPUT_NORM = "output_norm.weight"
LFM2_OUTPUT_NORM = "token_embd_norm.weight"  # its name in files of LFM2
ROPE_FREQS = "rope_freqs.weight"  # divisors of the frequencies
# LongRoPE's divisors, for contexts up to the original length and for longer ones.
SHORT_ROPE_FACTORS = "rope_factors_short.weight"
LONG_ROPE_FACTORS = "rope_factors_long.weight"

ATTN_NORM = "attn_norm"
ATTN_Q = "attn_q"
ATTN_K = "attn_k"
ATTN_V = "attn_v"
ATTN_OUTPUT = "attn_output"
ATTN_Q_NORM = "attn_q_norm"
ATTN_K_NORM = "attn_k_norm"
ATTN_SINKS = "attn_sinks"
# Latent attention.
ATTN_Q_A = "attn_q_a"
ATTN_Q_A_NORM = "attn_q_a_norm"
ATTN_Q_B = "attn_q_b"
ATTN_KV_A_MQA = "attn_kv_a_mqa"
ATTN_KV_A_NORM = "attn_kv_a_norm"
ATTN_K_B = "attn_k_b"  # by head, transposed
ATTN_V_B = "attn_v_b"  # by head
ATTN_KV_B = "attn_kv_b"  # in older files, instead of the two above
# Gated DeltaNet. llama.cpp names the parts of recurrent layers like those of state space models.
ATTN_QKV = "attn_qkv"
ATTN_GATE = "attn_gate"  # z
SSM_BA = "ssm_ba"
SSM_BETA = "ssm_beta"
SSM_ALPHA = "ssm_alpha"
SSM_CONV1D = "ssm_conv1d"
SSM_A = "ssm_a"  # this is the full name within its layer
SSM_DT = "ssm_dt"  # its tensor is a bias
SSM_NORM = "ssm_norm"
SSM_OUT = "ssm_out"
# Mamba-2: one matrix for z, the convolution's channels and dt; the factors of x, whose full name this is.
SSM_IN = "ssm_in"
SSM_D = "ssm_d"
# Short convolutions: the matrix of b, c and x, the convolution, the matrix from its output.
SHORT_CONV_IN = "shortconv.in_proj"
SHORT_CONV = "shortconv.conv"
SHORT_CONV_OUT = "shortconv.out_proj"
# Kimi Delta Attention: convolutions; matrices to the low-rank inputs of decays (f) and output gates (g), and from
# them.
SSM_CONVS = ("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v")
SSM_F_A = "ssm_f_a"
SSM_F_B = "ssm_f_b"
SSM_G = "ssm_g"  # of Kimi-K3, in the place of the next two
SSM_G_A = "ssm_g_a"
SSM_G_B = "ssm_g_b"
FFN_NORM = "ffn_norm"
POST_ATTENTION_NORM = "post_attention_norm"  # FFN_NORM's name in some architectures
# Sandwiched layers: norms of block outputs. There POST_ATTENTION_NORM normalises attention's output.
POST_FFW_NORM = "post_ffw_norm"
POST_FFW_NORM_1 = "post_ffw_norm_1"  # norm of the output of the dense feed-forward next to experts
PRE_FFW_NORM_2 = "pre_ffw_norm_2"  # norm of the experts' input
POST_FFW_NORM_2 = "post_ffw_norm_2"  # norm of the experts' output
LAYER_OUTPUT_SCALE = "layer_output_scale"
# Per-layer embeddings: the table of all layers for each token; the projection of the token embeddings and its norm;
# then the parts within a layer.
LAYER_INPUT_EMBD = "per_layer_token_embd.weight"
LAYER_INPUT_MODEL_PROJ = "per_layer_model_proj.weight"
LAYER_INPUT_PROJ_NORM = "per_layer_proj_norm.weight"
LAYER_INPUT_GATE = "inp_gate"
LAYER_INPUT_PROJ = "proj"
LAYER_INPUT_NORM = "post_norm"
# Hyper-connections have four tensors for each block: norm, down, up, and the weights of the block's output (inject).
HC_ATTN = "hc_attn"
HC_FFN = "hc_ffn"
OUTPUT_HC = "output_hc"  # before the head, without inject
# Attention residuals have one for each block: the weight of the streams' norm times that of their scores' product.
RES_SCORES = {HC_ATTN: "attn_res_score", HC_FFN: "ffn_res_score", OUTPUT_HC: "output_res_score"}
# N-gram embeddings have these, and their table is LAYER_INPUT_EMBD.
PLE_KEY = "ple_key"
PLE_VALUE = "ple_value"
PLE_NORM_QUERY = "ple_norm_query"
PLE_NORM_KEY = "ple_norm_key"
PLE_NORM_CONV = "ple_norm_conv"
PLE_CONV1D = "ple_conv1d"
# The indexer, which chooses the keys of latent attention.
INDEXER_TYPES = "attention.indexer.types"  # per layer, whether it has an indexer of its own
INDEXER_K = "indexer.attn_k"
INDEXER_Q_B = "indexer.attn_q_b"
INDEXER_PROJ = "indexer.proj"
INDEXER_K_NORM = "indexer.k_norm"
INDEXER = (
    f"{INDEXER_K}.weight",
    f"{INDEXER_Q_B}.weight",
    f"{INDEXER_PROJ}.weight",
    f"{INDEXER_K_NORM}.weight",
    f"{INDEXER_K_NORM}.bias",
)
# The indexer of MiniMax-M3 and Qwen3.8-Flash-Next, which chooses blocks of keys.
INDEXER_Q_PROJ = "indexer.q_proj"
INDEXER_K_PROJ = "indexer.k_proj"
INDEXER_Q_NORM = "indexer.q_norm"
BLOCK_INDEXER = (
    f"{INDEXER_Q_PROJ}.weight",
    f"{INDEXER_K_PROJ}.weight",
    f"{INDEXER_Q_NORM}.weight",
    f"{INDEXER_K_NORM}.weight",
)
# Of compressed attention: the key, which is the value too, and the output's two matrices, the first by groups of heads.
ATTN_KV = "attn_kv"
ATTN_OUTPUT_A = "attn_output_a"
ATTN_OUTPUT_B = "attn_output_b"


class CompressorNames(NamedTuple):
    """A compressor's two products, the biases by a token's place in its block, and the entries' norm."""

    kv: str
    gate: str
    bias: str
    norm: str


# Of the compressors of keys and of index keys.
COMPRESSORS = tuple(
    CompressorNames(*(f"{owner}_compressor_{part}" for part in ("kv", "gate", "ape", "norm")))
    for owner in ("attn", "indexer")
)
INDEX_POOLS = COMPRESSORS[1]  # of pooled index keys, which have a gate and biases alone
FFN_GATE = "ffn_gate"  # in a layer without experts
FFN_UP = "ffn_up"
FFN_DOWN = "ffn_down"
FFN_GATE_INP = "ffn_gate_inp"  # the router
EXPERTS_BY_TOKEN = "ffn_gate_tid2eid"  # experts by token id, where the router only weighs
EXP_PROBS_B = "exp_probs_b"  # a bias added to scores for choosing experts only
FFN_GATE_EXPS = "ffn_gate_exps"
FFN_UP_EXPS = "ffn_up_exps"
FFN_DOWN_EXPS = "ffn_down_exps"
FFN_GATE_UP_EXPS = "ffn_gate_up_exps"  # both in one tensor: merged_experts.py
FFN_LATENT_DOWN = "ffn_latent_down"  # to the experts' input, and from their output
FFN_LATENT_UP = "ffn_latent_up"
LATENT_PARTS = (FFN_LATENT_DOWN, FFN_LATENT_UP)
FFN_ROUTED_DOWN = "ffn_routed_down"  # the same in Kimi-K3, and a norm between the experts and the second
FFN_ROUTED_UP = "ffn_routed_up"
ROUTED_PARTS = (FFN_ROUTED_DOWN, FFN_ROUTED_UP)
FFN_ROUTED_NORM = "ffn_routed_norm"
LATENT_NORMED = "expert_latent_norm"  # a setting of folders, not of GGUF files: FFN_ROUTED_NORM is there
FFN_GATE_SHEXP = "ffn_gate_shexp"  # the shared expert's
FFN_UP_SHEXP = "ffn_up_shexp"
FFN_DOWN_SHEXP = "ffn_down_shexp"
FFN_GATE_INP_SHEXP = "ffn_gate_inp_shexp"  # a vector: gate of the shared expert's output

NEXTN_LAYERS = "nextn_predict_layers"  # how many of the blocks predict further tokens (MTP)
NEXT_TOKEN_WINDOWED = "nextn_sliding_window"  # ours, of folders: whether the first of them has a window
# Parts of a next-token block (MTP), besides those of its layer.
NEXTN_EH_PROJ = "nextn.eh_proj"
NEXTN_ENORM = "nextn.enorm"
NEXTN_HNORM = "nextn.hnorm"
NEXTN_HEAD_NORM = "nextn.shared_head_norm"
LAYER_OUTPUT_NORM = "layer_output_norm"  # NEXTN_HEAD_NORM's name in bailingmoe3, and in MiMo's files
NEXTN_NORMS = (NEXTN_ENORM, NEXTN_HNORM, NEXTN_HEAD_NORM)

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
