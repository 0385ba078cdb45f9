// Looks up n-gram embeddings: hashes tokens to rows of a table that stays in mapped files, and caches recent rows.
// kernels/ngrams/hashing.py and models/loading/table_rows.py specify the hashes and the cache.
//
// One call serves a step. A GPU's step may be launched before the host knows its tokens: `Job` is then called by CUDA
// on a thread of its own, when the stream has brought the tokens to the host, and Python's lock is not needed.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace moeserve {

// Rows that follow those of the part before; row i is at `at` + i * factor % modulus * stride.
struct RowPart {
  const uint8_t* at;
  int64_t rows, stride, factor, modulus;
};

struct OpenFile {  // an open file, and its version when it was mapped
  int fd;
  int64_t device, inode, bytes, changed_ns;
  bool is_changed() const;
};

struct NgramHeads {  // as in hashing.py
  std::vector<int64_t> multipliers, rows, offsets;
  int64_t end_token;
};

struct RowForm {
  int type;             // GGUF's number
  int64_t cols, bytes;  // of a row as `take` returns it
  // 8-bit floats: columns that share a copy of `scale`, which is stored before them; else 0.
  int64_t scaled_block;
  float scale;
};

class NgramTable {
 public:
  // cached: rows of the cache. Throws std::invalid_argument for heads beyond the parts.
  NgramTable(std::vector<RowPart> parts, std::vector<OpenFile> files, NgramHeads heads, RowForm form,
             int64_t cached);

  int64_t heads() const { return static_cast<int64_t>(heads_.rows.size()); }
  int64_t before() const { return static_cast<int64_t>(heads_.multipliers.size()) - 1; }
  const RowForm& form() const { return form_; }

  // Begins a look-up and returns its number, for `take_failures`. Look-ups are executed in this order.
  int64_t begin() { return ++begun_; }
  // Writes the tokens' rows, [n * heads, bytes]; zeros where the file has changed. tokens: [n], negative ones count as
  // 0; previous: [n, before()]. Callable by any thread.
  void take(int64_t number, const int32_t* tokens, const int32_t* previous, int64_t n, uint8_t* out);
  // The same as floats, [n * heads, cols].
  void embed(int64_t number, const int32_t* tokens, const int32_t* previous, int64_t n, float* out);
  // Returns the tokens that lacked a row, by number, of all look-ups begun but the last `but` ones; each once.
  std::vector<int64_t> take_failures(int64_t but);
  // Returns rows found in the cache and rows read since the last call.
  std::pair<int64_t, int64_t> take_counts();

 private:
  struct Missing {
    int64_t row, at;
  };
  void hash(int32_t token, const int32_t* previous, int64_t* rows) const;
  bool is_changed() const;
  void read(int64_t row, uint8_t* out) const;

  const std::vector<RowPart> parts_;
  const std::vector<OpenFile> files_;
  const NgramHeads heads_;
  const RowForm form_;
  int64_t begun_ = 0;  // by the one thread that begins look-ups

  std::mutex mutex_;             // of all below
  std::vector<int64_t> row_at_;  // the row at each place of the cache; -1: empty
  std::unique_ptr<uint8_t[]> cache_;
  std::vector<int64_t> rows_;
  std::vector<Missing> missing_;
  std::vector<std::pair<int64_t, int64_t>> failed_;  // look-up and token
  int64_t hits_ = 0, reads_ = 0;
};

// A look-up that CUDA calls, once.
struct NgramJob {
  std::shared_ptr<NgramTable> table;
  int64_t number;
  const int32_t* tokens;
  std::vector<int32_t> previous;
  int64_t n;
  float* out;
};
extern "C" void moeserve_ngram_job(void* job);  // a CUhostFn; destroys the job

}  // namespace moeserve
