"""The gated delta rule token by token, as a Triton kernel; a program holds some columns of one head's state."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.launch import kernel


@triton.jit
def log_decay(a, rate, dt_bias):
    """Returns -exp(A_log) * softplus(a + dt_bias), the natural logarithm of the decay, in float32. rate:
    -exp(A_log)."""
    x = a.to(tl.float32) + dt_bias
    return rate * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def bounded_log_decay(a, rate, dt_bias, BOUND: tl.constexpr):
    """Returns BOUND * sigmoid(exp(A_log) * (a + dt_bias)), the natural logarithm of the decay, in float32, for a layer
    whose decays are bounded. rate = -exp(A_log); BOUND: the least logarithm, below 0."""
    return BOUND / (1.0 + tl.exp(rate * (a.to(tl.float32) + dt_bias)))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x.to(tl.float32)))


@triton.jit
def move_conv_state(
    qkv, state, first, tokens, share,
    STRIDE: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Replaces state [TAPS - 1, CHANNELS] by the last inputs of a sequence with `tokens` rows from `first` on. Only
    the `share`th part, of SHARE channels. Works in place, because each state row takes its content from a later one."""
    channel = share * SHARE + tl.arange(0, SHARE)
    live = channel < CHANNELS
    for j in tl.static_range(TAPS - 1):
        source = tokens - (TAPS - 1) + j  # negative: still from the previous state
        here = tl.load(qkv + (first + source).to(tl.int64) * STRIDE + channel, live & (source >= 0), 0.0)
        before = tl.load(state + (TAPS - 1 + source) * CHANNELS + channel, live & (source < 0), 0.0)
        tl.store(state + j * CHANNELS + channel, here.to(tl.float32) + before, live)


@triton.jit
def copy_share(
    source, target, rows, share,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, CHANNELS: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Copies channels share * SHARE .. + SHARE - 1, as far as they are below CHANNELS, of `rows` rows from `source` to
    `target`, converted to float32. SOURCE, TARGET: distance of their rows in elements."""
    channel = share * SHARE + tl.arange(0, SHARE)
    live = channel < CHANNELS
    for row in range(rows):
        x = tl.load(source + tl.cast(row, tl.int64) * SOURCE + channel, live, 0.0)
        tl.store(target + tl.cast(row, tl.int64) * TARGET + channel, x.to(tl.float32), live)


@triton.jit
def record_channels(
    rows, mixed, record, first, drafts, share,
    STRIDE: tl.constexpr, RECORD: tl.constexpr, CHANNELS: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Writes the beginning of the records of `drafts` rows from `first` on: CHANNELS of the convolution's input, then
    as many of its output. Only the `share`th part of each, of SHARE channels. rows, STRIDE apart: its input; mixed
    [n, CHANNELS]: its output; record: the first record, RECORD apart. Returns where the rest of the first begins."""
    row = first.to(tl.int64)
    copy_share(rows + row * STRIDE, record, drafts, share, STRIDE, RECORD, CHANNELS, SHARE)
    copy_share(mixed + row * CHANNELS, record + CHANNELS, drafts, share, CHANNELS, RECORD, CHANNELS, SHARE)
    return record + 2 * CHANNELS


@kernel
def recurrent_kernel(
    qkv, mixed, b, a, rate, dt_bias, states, seq_first, seq_count, seq_slot, seq_drafts, seq_record, records, out,
    QKV_STRIDE: tl.constexpr, B_STRIDE: tl.constexpr, A_STRIDE: tl.constexpr, GROUP: tl.constexpr, SLOT: tl.constexpr,
    CONV: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, TILED: tl.constexpr, TAPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    SHARE: tl.constexpr, BY_CHANNEL: tl.constexpr, BOUND: tl.constexpr, RECORD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes the gated delta rule token by token, writes `out`, and advances the sequences' states and convolution
    states in place. Grid (sequences, VALUE_HEADS, VALUE_DIM / BLOCK). seq_first, seq_count, seq_slot int32: a
    sequence's first row, number of rows (0: padding) and state slot.

    seq_drafts, seq_record int32: how many of a sequence's last rows are drafts, which do not move its state, and the
    first of their records; records float32, RECORD apart: see `commit_kernel`. All None: there are no drafts.

    mixed [n, channels]: the convolution's output; qkv, rows QKV_STRIDE apart: its input, whose last rows become the
    convolution state. b, a: of value head h, at h // R * GROUP + h % R with R = VALUE_HEADS / KEY_HEADS.
    BY_CHANNEL: a and dt_bias are per dimension of the key heads instead (there are VALUE_HEADS key heads), and with
    BOUND below 0 this is the least logarithm of a decay.
    states float32, slots SLOT apart: [VALUE_HEADS, KEY_DIM, VALUE_DIM], and [TAPS - 1, channels] at offset CONV. out
    float32 [n, VALUE_HEADS * VALUE_DIM]. SIZE: a power of two that holds KEY_DIM; SHARE: a power of two that holds
    a program's part of the channels.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    r: tl.constexpr = VALUE_HEADS // KEY_HEADS
    sequence, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tokens = tl.load(seq_count + sequence)
    if tokens == 0:
        return
    first = tl.load(seq_first + sequence)
    state = states + tl.load(seq_slot + sequence).to(tl.int64) * SLOT
    share = head * (VALUE_DIM // BLOCK) + block
    kept = tokens
    if seq_drafts is not None:
        drafts = tl.load(seq_drafts + sequence)
        kept = tokens - drafts
        record = records + tl.load(seq_record + sequence).to(tl.int64) * RECORD
        record = record_channels(
            qkv, mixed, record, first + kept, drafts, share, QKV_STRIDE, RECORD, channels, SHARE
        )
    move_conv_state(qkv, state + CONV, first, kept, share, QKV_STRIDE, channels, TAPS, SHARE)
    key_head = head % KEY_HEADS if TILED else head // r
    d, c = tl.arange(0, SIZE), block * BLOCK + tl.arange(0, BLOCK)
    live = d < KEY_DIM
    at = state + (head * KEY_DIM + d)[:, None] * VALUE_DIM + c[None, :]
    s = tl.load(at, live[:, None], 0.0)
    gate = head // r * GROUP + head % r
    speed = tl.load(rate + head)
    if BY_CHANNEL:
        bias = tl.load(dt_bias + head * KEY_DIM + d, live, 0.0)
    else:
        bias = tl.load(dt_bias + head)
    for t in range(tokens):
        row = (first + t).to(tl.int64)
        q = tl.load(mixed + row * channels + key_head * KEY_DIM + d, live, 0.0).to(tl.float32)
        k = tl.load(mixed + row * channels + (KEY_HEADS + key_head) * KEY_DIM + d, live, 0.0).to(tl.float32)
        v = tl.load(mixed + row * channels + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + c).to(tl.float32)
        beta = sigmoid(tl.load(b + row * B_STRIDE + gate))
        if BY_CHANNEL:
            x = tl.load(a + row * A_STRIDE + head * KEY_DIM + d, live, 0.0)
            if BOUND < 0:
                decay = tl.exp(bounded_log_decay(x, speed, bias, BOUND))
            else:
                decay = tl.exp(log_decay(x, speed, bias))
            s *= decay[:, None]
        else:
            decay = tl.exp(log_decay(tl.load(a + row * A_STRIDE + gate), speed, bias))
            s *= decay
        if seq_drafts is not None:  # noqa: SIM102 - known when compiled
            if (t >= kept) & (block == 0):
                mine = record + tl.cast(t - kept, tl.int64) * RECORD
                tl.store(mine + head, beta)
                if BY_CHANNEL:
                    tl.store(mine + VALUE_HEADS + head * KEY_DIM + d, decay, live)
                else:
                    tl.store(mine + VALUE_HEADS + head, decay)
        change = (v - tl.sum(s * k[:, None], 0)) * beta
        s += k[:, None] * change[None, :]
        tl.store(out + row * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + c, tl.sum(s * q[:, None], 0))
        if seq_drafts is not None:  # noqa: SIM102 - known when compiled
            if t + 1 == kept:
                tl.store(at, s, live[:, None])
    if seq_drafts is None:
        tl.store(at, s, live[:, None])


@kernel
def commit_kernel(
    records, states, layer_first, moved,
    MOVED_STRIDE: tl.constexpr, LAYERS: tl.constexpr, LAYER: tl.constexpr, RECORD: tl.constexpr, SLOT: tl.constexpr,
    CONV: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, TILED: tl.constexpr, TAPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    SHARE: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Advances the states of all layers, in place, by the accepted drafts, from the records that `recurrent_kernel`
    wrote and with its arithmetic. Grid (sequences * LAYERS, VALUE_HEADS, VALUE_DIM / BLOCK).

    records float32 [LAYERS, drafts, RECORD], layers LAYER apart: the channels before and after the convolution, then
    beta of each value head, then the decays. layer_first int32 [LAYERS]: a layer's first number in a slot of states.
    moved int32, rows MOVED_STRIDE apart: state slot, first record and accepted drafts of each sequence. Others: as for
    `recurrent_kernel`.
    """
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    r: tl.constexpr = VALUE_HEADS // KEY_HEADS
    sequence, layer = tl.program_id(0) // LAYERS, tl.program_id(0) % LAYERS
    head, block = tl.program_id(1), tl.program_id(2)
    tokens = tl.load(moved + 2 * MOVED_STRIDE + sequence)
    state = states + tl.load(moved + sequence).to(tl.int64) * SLOT + tl.load(layer_first + layer)
    records += tl.cast(layer, tl.int64) * LAYER
    record = records + tl.load(moved + MOVED_STRIDE + sequence).to(tl.int64) * RECORD
    move_conv_state(
        record, state + CONV, 0, tokens, head * (VALUE_DIM // BLOCK) + block, RECORD, channels, TAPS, SHARE
    )
    key_head = head % KEY_HEADS if TILED else head // r
    d, c = tl.arange(0, SIZE), block * BLOCK + tl.arange(0, BLOCK)
    live = d < KEY_DIM
    at = state + (head * KEY_DIM + d)[:, None] * VALUE_DIM + c[None, :]
    s = tl.load(at, live[:, None], 0.0)
    for t in range(tokens):
        mixed = record + tl.cast(t, tl.int64) * RECORD + channels
        gates = mixed + channels
        k = tl.load(mixed + (KEY_HEADS + key_head) * KEY_DIM + d, live, 0.0)
        v = tl.load(mixed + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + c)
        beta = tl.load(gates + head)
        if BY_CHANNEL:
            s *= tl.load(gates + VALUE_HEADS + head * KEY_DIM + d, live, 0.0)[:, None]
        else:
            s *= tl.load(gates + VALUE_HEADS + head)
        change = (v - tl.sum(s * k[:, None], 0)) * beta
        s += k[:, None] * change[None, :]
    tl.store(at, s, live[:, None])
