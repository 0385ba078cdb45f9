// Stream's operations on a residual of several streams and on n-gram embeddings: argument checks.
#include "ops/attended_streams.h"
#include "ops/sinkhorn.h"
#include "ops/streams.h"
#include "state_checks.h"
#include "stream.h"
#include "stream_checks.h"

namespace moeserve {
namespace {

// Returns the number of streams of `hidden` numbers in rows of `width` numbers.
int streams_of(int64_t width, int64_t hidden, const char* name) {
  if (hidden < 32 || hidden % 32 != 0) reject(name, "streams of a multiple of 32 numbers wanted");
  if (width < hidden || width % hidden != 0) reject(name, "rows of whole streams wanted");
  return static_cast<int>(width / hidden);
}

int64_t columns(nanobind::handle tensor, const char* name) {
  return tensor_arg(tensor, name, Element::kFloat32).cols;
}

}  // namespace

void Stream::stream_norm(Tensor x, Tensor weight, float eps, int n, const Activations& y, Tensor rows) {
  const TensorArg w = tensor_arg(weight, "weight", Element::kFloat32);
  const int streams = streams_of(w.size(), w.cols, "weight");
  check_activations(y, "y", n, w.size(), false);
  const int64_t most = rows.is_none() ? n : tensor_arg(x, "x", Element::kFloat32).rows;
  StreamNormOp op{&kernels_,
                  rows_arg<float>(x, "x", most, w.size()),
                  static_cast<float*>(w.data),
                  eps,
                  nullptr,
                  n,
                  streams,
                  static_cast<int>(w.cols),
                  y};
  if (!rows.is_none()) {
    op.rows = rows_arg<int32_t>(rows, "rows", n, 1);
    check_ids("row", op.rows, n, most);
  }
  pool_.submit(op);
}

void Stream::scaled_silu(Tensor x, float factor, int n, const Activations& out) {
  if (out.cols % 32 != 0) reject("out", "columns that 32 divides wanted");
  check_activations(out, "out", n, out.cols, false);
  pool_.submit(ScaledSiluOp{&kernels_, rows_arg<float>(x, "x", n, out.cols), factor, n, out});
}

void Stream::mix_streams(Tensor gate, const Activations& x, int n, const Activations& out) {
  const int streams = streams_of(x.cols, out.cols, "out");
  check_activations(x, "x", n, x.cols, false);
  check_activations(out, "out", n, out.cols, false);
  pool_.submit(MixStreamsOp{&kernels_, rows_arg<float>(gate, "gate", n, x.cols), x.f32, n, streams, out});
}

void Stream::inject(Tensor block, Tensor weights, int n, Tensor x) {
  const int64_t hidden = columns(block, "block");
  const int streams = streams_of(columns(x, "x"), hidden, "block");
  pool_.submit(InjectOp{&kernels_, rows_arg<float>(block, "block", n, hidden),
                        rows_arg<float>(weights, "weights", n, streams), n, streams, static_cast<int>(hidden),
                        rows_arg<float>(x, "x", n, streams * hidden)});
}

void Stream::read_streams(Tensor products, Tensor x, Tensor rows, Tensor base, Tensor scale, float eps,
                          int iterations, Tensor norm, float norm_eps, int n, const Activations& y,
                          Tensor weights) {
  const TensorArg of_x = tensor_arg(x, "x", Element::kFloat32);
  const int streams = streams_of(of_x.cols, y.cols, "y");
  if (streams > kMostStreams) reject("x", "at most " + std::to_string(kMostStreams) + " streams wanted");
  check_activations(y, "y", n, y.cols, false);
  const int num = weights.is_none() ? streams : streams * (2 + streams);
  ReadStreamsOp op{};
  op.k = &kernels_;
  if (products.is_none()) {
    if (!weights.is_none()) reject("products", "those that `weights` are made from wanted");
  } else {
    if (iterations < 1) reject("iterations", "at least one wanted");
    op.products = rows_arg<float>(products, "products", n, num);
    const int scales = weights.is_none() ? 1 : 3;
    op.mix = {sized_arg<float>(base, "base", num), sized_arg<float>(scale, "scale", scales), eps, iterations};
  }
  op.x = rows_arg<float>(x, "x", rows.is_none() ? n : 0, of_x.cols);
  if (!rows.is_none()) {
    op.rows = rows_arg<int32_t>(rows, "rows", n, 1);
    check_ids("row", op.rows, n, of_x.rows);
  }
  op.norm = sized_arg<float>(norm, "norm", y.cols);
  op.norm_eps = norm_eps;
  op.n = n;
  op.streams = streams;
  op.y = y;
  if (!weights.is_none()) op.weights = rows_arg<float>(weights, "weights", n, streams * (1 + streams));
  pool_.submit(op);
}

void Stream::add_streams(Tensor block, Tensor weights, int n, Tensor x) {
  const int64_t hidden = columns(block, "block");
  const int streams = streams_of(columns(x, "x"), hidden, "block");
  if (streams > kMostStreams) reject("x", "at most " + std::to_string(kMostStreams) + " streams wanted");
  pool_.submit(AddStreamsOp{&kernels_, rows_arg<float>(block, "block", n, hidden),
                            rows_arg<float>(weights, "weights", n, streams * (1 + streams)), n, streams,
                            static_cast<int>(hidden), rows_arg<float>(x, "x", n, streams * hidden)});
}

void Stream::attend_streams(Tensor x, Tensor rows, Tensor score, Tensor norm, float eps, int num, int n,
                            const Activations& y) {
  const TensorArg of_x = tensor_arg(x, "x", Element::kFloat32);
  AttendStreamsOp op{};
  op.k = &kernels_;
  op.streams = streams_of(of_x.cols, y.cols, "y");
  if (num < 1 || num > std::min(op.streams, kMostAttended))
    reject("num", "1 to the number of streams wanted");
  check_activations(y, "y", n, y.cols, false);
  op.x = rows_arg<float>(x, "x", rows.is_none() ? n : 0, of_x.cols);
  if (!rows.is_none()) {
    op.rows = rows_arg<int32_t>(rows, "rows", n, 1);
    check_ids("row", op.rows, n, of_x.rows);
  }
  op.score = sized_arg<float>(score, "score", y.cols);
  op.norm = sized_arg<float>(norm, "norm", y.cols);
  op.eps = eps;
  op.n = n;
  op.num = num;
  op.y = y;
  pool_.submit(op);
}

void Stream::put_stream(Tensor block, int stream, bool add, int n, Tensor x) {
  const int64_t hidden = columns(block, "block");
  const int streams = streams_of(columns(x, "x"), hidden, "block");
  if (stream < 0 || stream >= streams) reject("stream", "one of x's streams wanted");
  pool_.submit(PutStreamOp{&kernels_, rows_arg<float>(block, "block", n, hidden), n, streams,
                           static_cast<int>(hidden), stream, add,
                           rows_arg<float>(x, "x", n, streams * hidden)});
}

void Stream::ngram_gate(Tensor x, Tensor key, Tensor value, Tensor query_norm, Tensor key_norm,
                        Tensor conv_norm, float eps, int n, Tensor factors) {
  const int64_t hidden = columns(value, "value"), width = columns(x, "x");
  const int streams = streams_of(width, hidden, "value");
  NgramGateOp op{};
  op.k = &kernels_;
  op.x = rows_arg<float>(x, "x", n, width);
  op.key = rows_arg<float>(key, "key", n, width);
  op.value = rows_arg<float>(value, "value", n, hidden);
  op.query_norm = sized_arg<float>(query_norm, "query_norm", width);
  op.key_norm = sized_arg<float>(key_norm, "key_norm", width);
  op.conv_norm = sized_arg<float>(conv_norm, "conv_norm", width);
  op.eps = eps;
  op.n = n;
  op.streams = streams;
  op.hidden = static_cast<int>(hidden);
  op.factors = rows_arg<float>(factors, "factors", n, streams);
  pool_.submit(op);
}

void Stream::ngram_conv(Tensor inputs, Tensor factors, Tensor value, Tensor conv, int dilation, Tensor states,
                        int64_t first, Tensor row, Tensor count, Tensor slot, Tensor drafts, Tensor kept,
                        Tensor pending, int n, Tensor x) {
  const int64_t hidden = columns(value, "value"), width = columns(x, "x");
  const TensorArg taps = tensor_arg(conv, "conv", Element::kFloat32);
  const TensorArg all = tensor_arg(states, "states", Element::kFloat32);
  NgramConvOp op{};
  op.streams = streams_of(width, hidden, "value");
  op.hidden = static_cast<int>(hidden);
  if (taps.rows < 2 || taps.rows > 16 || taps.cols != width) {
    reject("conv", "2 to 16 rows of " + std::to_string(width) + " elements wanted");
  }
  if (dilation < 1 || dilation > 16) reject("dilation", "1 to 16 wanted");
  op.k = &kernels_;
  op.taps = static_cast<int>(taps.rows);
  op.dilation = dilation;
  if (first < 0 || first + op.kept() * width > all.cols) reject("first", "the layer lies beside the states");
  op.inputs = rows_arg<float>(inputs, "inputs", n, width);
  op.factors = rows_arg<float>(factors, "factors", n, op.streams);
  op.value = rows_arg<float>(value, "value", n, hidden);
  op.conv = static_cast<float*>(taps.data);
  op.states = static_cast<float*>(all.data) + first;
  op.slot_values = all.cols;
  op.sequences = state_sequences_arg(row, count, slot, n, all.rows);
  add_drafts(op.sequences, drafts, kept);
  if (op.sequences.drafts != nullptr) {
    op.pending = draft_rows_arg(pending, width, op.sequences.num, op.sequences.drafts, op.sequences.first);
  }
  op.x = rows_arg<float>(x, "x", n, width);
  pool_.submit(op);
}

void Stream::commit_windows(Tensor states, int64_t first, int kept_rows, Tensor slot, Tensor kept,
                            Tensor accepted, Tensor pending) {
  const TensorArg all = tensor_arg(states, "states", Element::kFloat32);
  CommitWindowsOp op{};
  op.channels = columns(pending, "pending");
  if (op.channels % NgramConvOp::kColumns != 0) reject("pending", "columns that 32 divides wanted");
  if (first < 0 || kept_rows < 1 || first + kept_rows * op.channels > all.cols) {
    reject("first", "the layer lies beside the states");
  }
  op.states = static_cast<float*>(all.data) + first;
  op.slot_values = all.cols;
  op.kept = kept_rows;
  op.num = static_cast<int>(tensor_arg(slot, "slot", Element::kInt32).size());
  op.slot = sized_arg<int32_t>(slot, "slot", op.num);
  op.first = sized_arg<int32_t>(kept, "first", op.num);
  op.accepted = sized_arg<int32_t>(accepted, "accepted", op.num);
  check_ids("state slot", op.slot, op.num, all.rows);
  op.pending = draft_rows_arg(pending, op.channels, op.num, op.accepted, op.first);
  pool_.submit(op);
}

}  // namespace moeserve
